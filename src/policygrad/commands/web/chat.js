// Each model has messages of its own; a question is added to all, and each is asked for its reply, one after the other.
{
  const chat = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const begin = () => (chat.system ? [{ role: "system", content: chat.system }] : []);
  let conversations = chat.models.map(begin);
  let busy = false;

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  for (const label of chat.models) byId("heads").append(make("h2", "", label));
  byId("temperature").value = chat.temperature;
  byId("question").focus();

  const setBusy = (now) => {
    busy = now;
    const asked = conversations[0].some((message) => message.role === "user");
    byId("send").disabled = now;
    byId("again").disabled = byId("new").disabled = now || !asked;
  };

  const reply = async (model) => {
    const body = { model, messages: conversations[model], temperature: Number(byId("temperature").value) };
    try {
      const response = await fetch("/reply" + location.search, { method: "POST", body: JSON.stringify(body) });
      return await response.json();
    } catch (error) {
      return { error: `no answer (${error.message}): is policygrad chat still running?` };
    }
  };

  const show = (card, result) => {
    card.replaceChildren(card.firstChild);
    if (result.error) {
      card.append(make("p", "error-text", result.error));
      return;
    }
    if (result.reasoning) card.append(make("p", "reasoning", result.reasoning));
    card.append(make("p", "", result.answer));
    const cut = result.finish_reason === "length" ? ", cut off" : "";
    card.append(make("p", "size", `${result.tokens} token${result.tokens === 1 ? "" : "s"}${cut}`));
  };

  const answer = async (row) => {
    setBusy(true);
    for (const [model, card] of [...row.children].entries()) {
      show(card, { answer: "…", tokens: 0 });
      const result = await reply(model);
      show(card, result);
      if (!result.error) conversations[model].push({ role: "assistant", content: result.text });
    }
    setBusy(false);
  };

  const ask = (text) => {
    for (const messages of conversations) {
      if (messages.at(-1)?.role === "user") messages.pop(); // it was not answered
      messages.push({ role: "user", content: text });
    }
    const row = make("div", "columns");
    for (const label of chat.models) {
      const card = make("div", "answer");
      card.append(make("p", "who", label));
      row.append(card);
    }
    byId("turns").append(make("p", "question", text), row);
    row.scrollIntoView({ block: "nearest" });
    return answer(row);
  };

  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("question").value;
    if (busy || !text.trim()) return;
    byId("question").value = "";
    ask(text);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("form").requestSubmit();
    }
  });
  byId("again").addEventListener("click", () => {
    for (const messages of conversations) while (messages.at(-1).role !== "user") messages.pop();
    answer(byId("turns").lastChild);
  });
  byId("new").addEventListener("click", () => {
    conversations = chat.models.map(begin);
    byId("turns").replaceChildren();
    setBusy(false);
    byId("question").focus();
  });
}
