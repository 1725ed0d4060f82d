// Hides the problems that are not of the chosen kind.
{
  const articles = [...document.querySelectorAll("article[data-kinds]")];
  const kind = document.getElementById("kind"), count = document.getElementById("count");
  const filter = () => {
    let shown = 0;
    for (const article of articles) {
      article.hidden = Boolean(kind.value) && !article.dataset.kinds.split(" ").includes(kind.value);
      shown += !article.hidden;
    }
    count.textContent = `${shown} of ${articles.length} problems`;
  };
  kind.addEventListener("change", filter);
  filter();
}
