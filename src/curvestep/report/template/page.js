"use strict";
(async () => {
  const byId = (id) => document.getElementById(id);
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const [source, packed] = await Promise.all([unpack("plotly-packed"), unpack("data-packed")]);
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  const { template, charts } = JSON.parse(packed);

  // Colours of a chart are variables of the style sheet, which knows day and night.
  const paint = (value) => {
    if (typeof value === "string" && value.startsWith("var(--")) {
      const found = getComputedStyle(document.documentElement).getPropertyValue(value.slice(4, -1)).trim();
      return found.startsWith("[") ? JSON.parse(found) : found;
    }
    if (Array.isArray(value)) return typeof value[0] === "object" && value[0] ? value.map(paint) : value;
    if (!value || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, paint(item)]));
  };

  // ---- drawing: at once what can be seen, the rest when it comes into sight, again when something changes ----
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const drawn = new Set();
  const draw = (figure) => {
    const { data, layout, scales } = charts[figure.dataset.chart];
    const scale = figure.querySelector('[data-scale][aria-pressed="true"]')?.dataset.scale;
    const shape = { ...layout, template };
    if (innerWidth < 640) shape.legend = { ...template.layout.legend, font: { size: 10 } };
    for (const [axis, kind] of Object.entries(scales?.[scale] || {})) shape[axis] = { title: layout[axis].title, ...kind };
    const left = new Set([...figure.parentElement.querySelectorAll("[data-pick]:not(:checked)")].map((box) => box.dataset.pick));
    const plot = figure.querySelector(".plot");
    if (plot.clientWidth < 420) shape.xaxis = { ...shape.xaxis, dtick: null, nticks: 5 };
    if (document.documentElement.matches(".printing")) shape.width = plot.clientWidth;
    drawn.add(figure);
    return Plotly.react(plot, paint(data.filter((curve) => !left.has(curve.legendgroup))), paint(shape),
      { displayModeBar: false, responsive: true });
  };
  const redraw = (test = () => true) => [...drawn].filter(test).forEach(draw);
  const isNear = (figure) => figure.checkVisibility() && figure.getBoundingClientRect().top < 1.5 * innerHeight;
  const sight = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }), { rootMargin: "300px" });
  const drawAll = () => {
    document.querySelectorAll("details.run").forEach((details) => { details.open = true; });
    return Promise.all(figures.map(draw));
  };
  const turnPrinting = (on) => {
    document.documentElement.classList.toggle("printing", on);
    figures.filter((figure) => figure.checkVisibility()).forEach(draw);
  };
  window.addEventListener("beforeprint", () => turnPrinting(true));
  window.addEventListener("afterprint", () => turnPrinting(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());

  // ---- controls ----
  const say = (words) => { byId("spoken").textContent = words; };
  const showScale = (figure) => {
    const { scales, layout } = charts[figure.dataset.chart], buttons = [...figure.querySelectorAll("[data-scale]")];
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.scale === layout.yaxis.type)));
    buttons[0].parentElement.hidden = !scales;
  };
  figures.forEach((figure) => {
    const plot = figure.querySelector(".plot"), name = () => figure.querySelector("h3").textContent;
    figure.querySelector(".head").append(byId("tools").content.cloneNode(true));
    figure.querySelector("[role=group]").setAttribute("aria-label", `axes of ${name()}`);
    figure.querySelectorAll("[data-save]").forEach((b) => b.setAttribute("aria-label", `save ${name()} as ${b.textContent}`));
    showScale(figure);
    figure.querySelectorAll("[data-scale]").forEach((button) => button.addEventListener("click", () => {
      figure.querySelectorAll("[data-scale]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      draw(figure);
      say(`${name()}: ${button.dataset.scale} axes`);
    }));
    figure.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", async () => {
      await draw(figure);
      Plotly.downloadImage(plot, { format: button.dataset.save, width: 900, height: 560, filename: `curvestep-${charts[figure.dataset.chart].kind}` });
    }));
    plot.addEventListener("keydown", (event) => walk(event, plot));
  });
  // Arrow keys on a focused chart go from point to point and read it out; up and down change the curve.
  const walk = (event, plot) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key] || 0;
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0;
    if ((!move && !turn) || !plot.data) return;
    event.preventDefault();
    const curves = plot.data.filter((curve) => curve.hoverinfo !== "skip"), at = plot.at || { curve: 0, point: -1 };
    at.curve = (at.curve + turn + curves.length) % curves.length;
    const curve = curves[at.curve], xs = curve.x;
    do { at.point += move || 1; } while (at.point >= 0 && at.point < xs.length && curve.y[at.point] === null);
    at.point = Math.min(Math.max(at.point, 0), xs.length - 1);
    Plotly.Fx.hover(plot, [{ curveNumber: plot.data.indexOf(curve), pointNumber: at.point }]);
    const more = curve.customdata ? `; ${curve.customdata[at.point].join(", ")}` : "";
    say(`${curve.name}: ${xs[at.point]}, ${curve.y[at.point]}${more}`);
    plot.at = at;
  };
  document.querySelectorAll("[data-shows]").forEach((select) => select.addEventListener("change", () => {
    const figure = byId(select.dataset.shows).closest("figure");
    figure.dataset.chart = select.value;
    figure.querySelector("h3").textContent = select.selectedOptions[0].textContent;
    showScale(figure);
    draw(figure);
  }));
  document.querySelectorAll("[data-pick]").forEach((box) => box.addEventListener("change", () =>
    redraw((figure) => figure.parentElement.contains(box))));
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("pre");
    getSelection().selectAllChildren(code);  // where the clipboard is refused, it is at least selected
    say("copied");
    await navigator.clipboard?.writeText(code.textContent).catch(() => {});
  }));
  document.querySelectorAll("[data-enlarge]").forEach((button) => button.addEventListener("click", () => {
    const large = button.closest("figure").classList.toggle("large");
    button.setAttribute("aria-pressed", String(large));
  }));

  figures.filter(isNear).forEach(draw);
  figures.forEach((figure) => sight.observe(figure));
  // Then a dozen more while nothing else is to do, so that a short page is whole before anybody scrolls.
  const idle = window.requestIdleCallback || setTimeout;
  figures.filter((figure) => figure.checkVisibility()).slice(0, 12).forEach((figure) => idle(() => drawn.has(figure) || draw(figure)));
  window.curvestepPage = { drawAll, drawn, charts };
  document.documentElement.dataset.ready = "yes";
})();
