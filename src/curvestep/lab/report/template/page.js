"use strict";
(async () => {
  const byId = (id) => document.getElementById(id);
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const script = document.createElement("script");
  script.textContent = await unpack("plotly-packed");
  document.head.append(script);
  const { runs, heat } = JSON.parse(await unpack("data-packed"));
  const wall = window.curvestepWall;

  // ---- colours, fonts and axes, from the style sheet ----
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const series = (i) => { const all = css("--series").split(" "); return all[i % all.length]; };
  // Viridis; on dark paper without its darkest end.
  const iterations = () => (matchMedia("(prefers-color-scheme: dark)").matches
    ? [[0, "#7b86e0"], [0.33, "#2fa8a0"], [0.66, "#7ad151"], [1, "#fde725"]] : "Viridis");
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const dash = (i) => dashes[Math.floor(i / 7) % 4];
  // Plotly reads a little markup in its texts: names from files are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const axis = (title, type = "linear", more = {}) => ({
    title: { text: title, standoff: 8 }, type, gridcolor: css("--line"), zeroline: false, automargin: true,
    linecolor: css("--line"), exponentformat: "power", ...more,
  });
  // Ticks of a logarithmic axis: 1, 2, 5 over two decades, else whole decades, few enough to be read on a phone.
  const logTicks = (low, high, most) => {
    const first = Math.floor(low), last = Math.ceil(high);
    const decades = Array.from({ length: last - first + 1 }, (_, i) => first + i);
    const fine = high > low && high - low <= 0.4 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((high - low) / most));
    const values = high - low <= 2 ? decades.flatMap((d) => fine.map((m) => m * 10 ** d))
      : decades.filter((d) => d % every === 0).map((d) => 10 ** d);
    const words = (v) => (v >= 0.00099 && v < 10001 ? String(+v.toPrecision(3)) : `${v / 10 ** Math.round(Math.log10(v)) > 1.1 ? `${+(v / 10 ** Math.floor(Math.log10(v))).toPrecision(2)}·` : ""}10<sup>${Math.floor(Math.log10(v) + 1e-9)}</sup>`);
    return { tickvals: values, ticktext: values.map(words) };
  };
  const withTicks = (data, shape) => {
    for (const name of ["x", "y"]) {
      const axis = shape[`${name}axis`];
      const values = data.flatMap((d) => d[name] || []).filter((v) => v !== null);
      if (!values.length) continue;
      let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      if (axis.type === "log") {
        const seen = values.filter((v) => v > 0).map(Math.log10);
        if (!seen.length) continue;
        [low, high] = axis.range || [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))];
        Object.assign(axis, logTicks(low, high, name === "x" ? 6 : 8));
      } else if (axis.title.text === "iteration" && high - low <= 8) axis.dtick = 1;
    }
    return shape;
  };
  const layout = (x, y, more = {}) => ({
    xaxis: x, yaxis: y, margin: { l: 56, r: 14, t: 12, b: 44 }, hovermode: "closest", dragmode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemclick: false, itemdoubleclick: false },
    showlegend: true, ...more,
  });
  const lines = (x, y, name, color, more = {}) => ({
    x, y, name: plain(name), mode: y.filter((v) => v !== null).length < 2 ? "lines+markers" : "lines",
    line: { color, width: 1.6 }, ...more,
  });
  const level = (x, y, name, color) => lines([x[0], x[x.length - 1]], [y, y], name, color, {
    line: { color, width: 1.6, dash: "dash" }, hoverinfo: "name",
  });
  const where = (values, flags, flag) => values.map((v, i) => (flags[i] === flag ? v : null));
  const times = (a, b, factor = 1) => a.map((v, i) => (v === null || b[i] === null ? null : v * b[i] * factor));
  const over = (a, b) => a.map((v, i) => (v === null || b[i] === null || b[i] === 0 ? null : v / b[i]));
  // Mean over the last twentieth of the rows (50 at most): the loss of single batches hides what differs.
  const smooth = (y) => {
    const window = Math.min(50, Math.max(1, Math.floor(y.length / 20)));
    return y.map((v, i) => {
      const last = y.slice(Math.max(0, i - window + 1), i + 1).filter((u) => u !== null);
      return v === null ? null : last.reduce((a, b) => a + b, 0) / last.length;
    });
  };
  const rowsOf = (run) => (run.train.step.length ? run.train : run.measured);

  // A run that diverged would press all others flat: the axis ends a little above the ones that did not.
  const calmRange = (shown, data, what, scale) => {
    if (what === "scatter" || !shown.some((run) => run.diverged)) return {};
    const calm = data.filter((_, i) => !shown[i].diverged).flatMap((d) => d.y).filter((v) => v !== null && (scale === "linear" || v > 0));
    if (!calm.length) return {};
    const to = (v) => (scale === "log" ? Math.log10(v) : v);
    const low = calm.reduce((a, b) => Math.min(a, b)), high = calm.reduce((a, b) => Math.max(a, b));
    const room = 0.08 * (to(high) - to(low)) || 1;
    return { range: [to(low) - room, to(high) + room] };
  };

  // ---- one function a chart: what to draw ----
  const charts = {
    scatter(run, scale) {
      const m = run.measured;
      const points = {
        x: m.grad_norm, y: m.smoothness, mode: "markers", name: "measured steps",
        customdata: m.step.map((s, i) => [s, m.loss[i], m.lr[i]]),
        hovertemplate: "step %{customdata[0]}<br>loss %{customdata[1]:.4g}<br>lr %{customdata[2]:.3g}"
          + "<br>gradient norm %{x:.4g}<br>smoothness %{y:.4g}<extra></extra>",
        marker: { color: m.step, colorscale: iterations(), size: 6, opacity: 0.9, line: { width: 0.6, color: css("--soft") },
          colorbar: { title: { text: "iteration", side: "right" }, thickness: 10, outlinewidth: 0 } },
      };
      const data = [points];
      if (run.line) {
        const g = run.frontier.map((p) => p[0]);
        data.push(lines(g, g.map((v) => run.line[0] + run.line[1] * v), "quantile line L0 + L1·g", series(1)));
        data.push(lines(g, run.frontier.map((p) => p[1]), "frontier", css("--ink"), {
          line: { color: css("--ink"), width: 1.3, dash: "dash" } }));
      }
      return { data, layout: layout(axis("gradient norm", scale), axis("local smoothness", scale)) };
    },
    norm(run) {
      const r = rowsOf(run);
      const data = [lines(r.step, r.grad_norm, "gradient norm", series(0))];
      if (r.clipped.includes(1)) {
        data.push({ x: r.step, y: where(r.grad_norm, r.clipped, 1), mode: "markers", name: "clipped steps",
          marker: { color: series(1), symbol: "triangle-up", size: 6 } });
      }
      if (run.max_norm !== null && r.step.length) data.push(level(r.step, run.max_norm, "clipping starts", css("--ink")));
      return { data, layout: layout(axis("iteration"), axis("gradient norm", "log")) };
    },
    loss(run, scale) {
      const r = rowsOf(run);
      const data = [lines(r.step, r.loss, "training loss", series(0))];
      if (run.held_out.step.length) {
        data.push({ ...lines(run.held_out.step, run.held_out.loss, "held-out loss", series(1)),
          mode: "lines+markers", marker: { symbol: "square", size: 7 } });
      }
      return { data, layout: layout(axis("iteration"), axis("loss", scale)) };
    },
    edge(run) {
      const m = run.measured;
      const taken = over(m.step_norm, m.grad_norm);
      const data = [
        lines(m.step, times(m.lr, m.smoothness, 0.5), "lr·L/2", series(0)),
        lines(m.step, times(taken, m.smoothness, 0.5), "step as taken·L/2", series(2), {
          line: { color: series(2), width: 1.6, dash: "dot" } }),
        level(m.step, 1, "edge of stability", series(1)),
      ];
      return { data, layout: layout(axis("iteration"), axis("lr·L/2", "log")) };
    },
    layers(run) {
      const z = run.layers.smoothness.map((row) => row.map((v) => (v > 0 ? Math.log10(v) : null)));
      const data = [{ type: "heatmap", x: run.measured.step, y: run.layers.names.map(plain), z, colorscale: "Viridis",
        text: run.layers.smoothness, hovertemplate: "%{y}<br>step %{x}<br>smoothness %{text:.4g}<extra></extra>",
        colorbar: { title: { text: "log10 smoothness", side: "right" }, thickness: 10, outlinewidth: 0 } }];
      return { data, layout: layout(axis("iteration"), axis("", "category"), { showlegend: false }) };
    },
    calibration(run) {
      const c = run.calibration;
      const marks = (b) => b.safe.map((safe) => (safe ? "circle" : "circle-open"));
      const data = c.batches.map((b, i) => ({
        ...lines(b.step, b.kappa, `batch ${i + 1}`, series(i)), mode: "lines+markers",
        marker: { color: series(i), size: 8, symbol: marks(b) },
        text: b.safe.map((safe, k) => `${safe ? "safe" : "not safe"}, loss ${b.loss[k] === null ? "not finite" : (b.loss[k] > 0 ? "+" : "") + b.loss[k].toPrecision(3)}`),
        hovertemplate: "step %{x:.4g}<br>gradient changes by %{y:.3g} times itself<br>%{text}<extra></extra>",
      }));
      const steps = c.batches.flatMap((b) => b.step).sort((a, b) => a - b);
      const kappas = c.batches.flatMap((b) => b.kappa).filter((v) => v > 0);
      const span = [Math.min(...kappas, c.kappa), Math.max(...kappas, c.kappa)];
      data.push(level(steps, c.kappa, "largest safe change", css("--ink")));
      data.push(lines([c.safe_step, c.safe_step], span, "safe step", css("--ink"), { hoverinfo: "name+x" }));
      const shapes = c.interval ? [{ type: "rect", xref: "x", yref: "paper", x0: c.interval[0], x1: c.interval[1],
        y0: 0, y1: 1, fillcolor: css("--soft"), opacity: 0.2, line: { width: 0 } }] : [];
      return { data, layout: layout(axis("step h", "log"), axis("h·L(h)", "log"), { shapes }) };
    },
    comparison(_, scale) {
      const what = byId("compared").value;
      const shown = [...document.querySelectorAll("[data-pick]")].filter((box) => box.checked).map((box) => +box.dataset.pick);
      const data = shown.map((i) => {
        const run = runs[i], m = run.measured;
        const r = what === "smoothness" ? m : rowsOf(run);
        if (what === "scatter") {
          return { x: m.grad_norm, y: m.smoothness, mode: "markers", name: plain(run.name),
            marker: { color: series(i), size: 5, opacity: 0.7, symbol: i % 24 } };
        }
        return lines(r.step, what === "loss" ? smooth(r.loss) : r[what], run.name, series(i), { line: { color: series(i), width: 1.6, dash: dash(i) } });
      });
      const title = { loss: "training loss (running mean)", grad_norm: "gradient norm", smoothness: "local smoothness", scatter: "local smoothness" }[what];
      const x = what === "scatter" ? axis("gradient norm", scale) : axis("iteration");
      const y = axis(title, scale, calmRange(shown.map((i) => runs[i]), data, what, scale));
      return { data, layout: layout(x, y, { showlegend: shown.length <= 7 }) };
    },
    heat() {
      const data = [{ type: "heatmap", x: heat.across.map(plain), y: heat.down.map(plain), z: heat.losses,
        colorscale: "Viridis", reversescale: true, text: heat.text.map((row) => row.map(plain)), texttemplate: "%{text}",
        hoverongaps: false, xgap: 2, ygap: 2, colorbar: { title: { text: "loss", side: "right" }, thickness: 10, outlinewidth: 0 },
        hovertemplate: `${plain(heat.rows)} %{y}<br>${plain(heat.columns)} %{x}<br>loss %{z:.4g}<extra></extra>` }];
      return { data, layout: layout(axis(plain(heat.columns), "category"), axis(plain(heat.rows), "category"),
        { showlegend: false }) };
    },
    "wall-function"() {
      const w = readWall(), x0 = wall.start(w), reach = 1.25 * x0;
      const xs = Array.from({ length: 201 }, (_, i) => -reach + (2 * reach * i) / 200);
      const iterates = (run, name, i, symbol) => {
        const out = run.xs.findIndex((x) => Math.abs(x) > reach);
        const seen = out < 0 ? run.xs : run.xs.slice(0, out + 1);  // the first one outside stands at the edge
        const inside = seen.map((x) => Math.max(-reach, Math.min(reach, x)));
        return { x: inside, y: inside.map((x) => wall.value(x, w)), mode: "lines+markers", name,
          line: { color: series(i), width: 1, dash: dash(i * 7) }, marker: { color: series(i), size: 9, symbol: inside.map((_, k) => (k === out ? "x" : symbol)) },
          text: inside.map((_, k) => k), hovertemplate: "iteration %{text}<br>x %{x:.4g}<extra></extra>" };
      };
      const data = [lines(xs, xs.map((x) => wall.value(x, w)), "f", css("--soft"), { hoverinfo: "skip" }),
        iterates(w.fixed, "fixed step", 1, "circle"), iterates(w.clipped, "clipped", 0, "square")];
      return { data, layout: layout(axis("x", "linear", { range: [-reach, reach] }), axis("f(x)")) };
    },
    "wall-slope"() {
      const w = readWall(), k = (run) => run.slopes.map((_, i) => i);
      const data = [lines(k(w.fixed), w.fixed.slopes, "fixed step", series(1)),
        lines(k(w.clipped), w.clipped.slopes, "clipped", series(0), { line: { color: series(0), width: 1.6, dash: "dash" } })];
      // A slope that runs away leaves at the top: it would press the other flat.
      const seen = [...w.fixed.slopes, ...w.clipped.slopes].filter((v) => v > 0).map(Math.log10);
      const range = [Math.max(Math.min(...seen), -16) - 0.5, Math.min(Math.max(...seen), Math.log10(w.M) + 3) + 0.5];
      return { data, layout: layout(axis("iteration", "linear", { range: [-1, NUM + 1] }), axis("|f′(x)|", "log", { range })) };
    },
    "wall-steps"() {
      const w = readWall(), limit = wall.limit(w);
      const hs = Array.from({ length: 121 }, (_, i) => 10 ** (-4 + (5 * i) / 120));
      const end = (h, norm) => { const run = wall.descend(w, h, norm, 60); return run.escaped ? null : Math.max(run.slopes.at(-1), 1e-16); };
      const fixed = hs.map((h) => end(h, Infinity)), clipped = hs.map((h) => end(h, wall.maxNorm(w)));
      const ys = [...fixed, ...clipped].filter((v) => v !== null), span = [Math.min(...ys), Math.max(...ys)];
      const upright = (x, name, color, style) => lines([x, x], span, name, color, { line: { color, width: 1.6, dash: style } });
      const data = [lines(hs, fixed, "fixed step", series(1)),
        lines(hs, clipped, "clipped", series(0), { line: { color: series(0), width: 1.6, dash: "dash" } }),
        upright(limit, "limit", css("--bad"), "dash"), upright(w.step, "your step", css("--ink"), "dot")];
      return { data, layout: layout(axis("step", "log"), axis("|f′| after 60 iterations", "log")) };
    },
  };

  // ---- drawing: when a chart comes into sight, and again when something changes ----
  const drawn = new Set();
  const scaleOf = (figure) => figure.querySelector('[data-scale][aria-pressed="true"]')?.dataset.scale || "linear";
  const draw = (figure) => {
    const run = figure.dataset.run === undefined ? null : runs[+figure.dataset.run];
    const { data, layout: shape } = charts[figure.dataset.chart](run, scaleOf(figure));
    drawn.add(figure);
    return Plotly.react(figure.querySelector(".plot"), data, withTicks(data, shape), { displayModeBar: false, responsive: true });
  };
  const redraw = (test = () => true) => [...drawn].filter(test).forEach(draw);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const sight = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }), { rootMargin: "300px" });
  const drawAll = () => {
    document.querySelectorAll("details.run").forEach((details) => { details.open = true; });
    return Promise.all(figures.map(draw));
  };
  window.addEventListener("beforeprint", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { swatches(); redraw(); });
  const swatches = () => document.querySelectorAll("[data-swatch]").forEach((s) => { s.style.background = series(+s.dataset.swatch); });

  // ---- controls ----
  const say = (words) => { byId("spoken").textContent = words; };
  figures.forEach((figure) => {
    const name = figure.querySelector("h3").textContent, plot = figure.querySelector(".plot");
    figure.querySelectorAll("[data-scale]").forEach((button) => button.addEventListener("click", () => {
      figure.querySelectorAll("[data-scale]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      draw(figure);
      say(`${name}: ${button.dataset.scale} axes`);
    }));
    figure.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", async () => {
      if (!drawn.has(figure)) await draw(figure);
      Plotly.downloadImage(plot, { format: button.dataset.save, width: 900, height: 560, filename: `curvestep-${figure.dataset.chart}` });
    }));
    plot.addEventListener("keydown", (event) => walk(event, plot));
  });
  // Arrow keys on a focused chart go from point to point and read it out; up and down change the curve.
  const walk = (event, plot) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key] || 0;
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0;
    if ((!move && !turn) || !plot.data) return;
    event.preventDefault();
    const count = plot.data.length;
    const at = plot.at || { curve: 0, point: -1 };
    at.curve = (at.curve + turn + count) % count;
    const curve = plot.data[at.curve], xs = curve.x;
    if (curve.type === "heatmap") {
      const size = curve.x.length * curve.y.length;
      at.point = Math.min(Math.max(at.point + move, 0), size - 1);
      const [i, j] = [Math.floor(at.point / curve.x.length), at.point % curve.x.length];
      say(`${curve.y[i]}, ${curve.x[j]}: ${curve.text[i][j]}`);
    } else {
      do { at.point += move || 1; } while (at.point >= 0 && at.point < xs.length && curve.y[at.point] === null);
      at.point = Math.min(Math.max(at.point, 0), xs.length - 1);
      Plotly.Fx.hover(plot, [{ curveNumber: at.curve, pointNumber: at.point }]);
      const more = curve.customdata ? `, step ${curve.customdata[at.point][0]}` : "";
      say(`${curve.name}: ${xs[at.point]}, ${curve.y[at.point]}${more}`);
    }
    plot.at = at;
  };
  byId("compared")?.addEventListener("change", () => redraw((f) => f.dataset.chart === "comparison"));
  document.querySelectorAll("[data-pick]").forEach((box) => box.addEventListener("change", () =>
    redraw((f) => f.dataset.chart === "comparison")));

  // ---- the panel for teaching ----
  const number = (v) => (v >= 0.001 && v < 1e5 ? String(+v.toPrecision(3)) : v.toExponential(2));
  const NUM = 60;
  const readWall = () => {
    const w = Object.fromEntries(["L0", "L1", "M", "step"].map((name) => [name, 10 ** +byId(`wall-${name}`).value]));
    return { ...w, fixed: wall.descend(w, w.step, Infinity, NUM), clipped: wall.descend(w, w.step, wall.maxNorm(w), NUM) };
  };
  const ending = (run) => (run.escaped ? `runs away within ${run.xs.length} iterations`
    : `stands at a slope of ${number(run.slopes.at(-1))} after ${run.slopes.length - 1} iterations`);
  const showWall = () => {
    const w = readWall(), limit = wall.limit(w), slider = byId("wall-step");
    ["L0", "L1", "M", "step"].forEach((name) => {
      byId(`wall-${name}-out`).textContent = number(w[name]);
      byId(`wall-${name}`).setAttribute("aria-valuetext", number(w[name]));
    });
    const place = (Math.log10(limit) - +slider.min) / (+slider.max - +slider.min);
    byId("wall-mark").style.left = `${100 * Math.min(Math.max(place, 0.06), 0.94)}%`;
    byId("wall-mark").textContent = `limit ${number(limit)}`;
    byId("wall-words").textContent = `The largest step for fixed-step descent is 2·ln(1 + L1·M/L0)/(L1·M) = ${number(limit)}. `
      + `Your step ${number(w.step)} is ${w.step > limit ? "above" : "below"} it: the fixed step ${ending(w.fixed)}; `
      + `clipped descent ${ending(w.clipped)}.`;
    redraw((f) => f.dataset.chart.startsWith("wall-"));
  };
  ["L0", "L1", "M", "step"].forEach((name) => byId(`wall-${name}`).addEventListener("input", showWall));

  swatches();
  showWall();
  figures.forEach((figure) => sight.observe(figure));
  window.curvestepPage = { drawAll, drawn, runs, heat };
  document.documentElement.dataset.ready = "yes";
})();
