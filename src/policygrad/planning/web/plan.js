// The plan's page: plots over numbers of devices; after plots.js.

for (const figure of document.querySelectorAll("[data-plot]")) linePlot(figure, DATA.plots[figure.dataset.plot]);
