"use strict";
// Draws the curves of the page. Everything else on it is text, and needs no script.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector("form.controls");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const printing = () => document.documentElement.classList.contains("printing");
  const colour = (index) => {
    // The golden angle keeps neighbours apart, however many runs there are.
    const hue = (215 + 137.508 * index) % 360;
    return `hsl(${hue.toFixed(0)} 65% ${dark.matches && !printing() ? 65 : 42}%)`;
  };
  const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const figure = (value) => (value == null ? "–" : String(Number(value.toPrecision(5))));
  const duration = (seconds) => {
    const whole = Math.round(seconds);
    const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
    const two = (number) => String(number).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  };
  const plots = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target);
      if (plot && target.clientWidth && target.clientWidth !== plot.width) {
        plot.setSize({ width: target.clientWidth, height: plot.height });
      }
    }
  });
  const several = data.runs.length > 1;

  const axis = (extra) => ({
    stroke: theme("--soft"),
    grid: { stroke: theme("--line"), width: 1 },
    ticks: { stroke: theme("--line"), width: 1 },
    ...extra,
  });

  const keep = (box, plot) => {
    plots.set(box, plot);
    observer.observe(box);
  };

  // A line where the ranks were started again, with the reason as its title.
  const mark = (plot, runs, over) => {
    plot.over.querySelectorAll(".mark").forEach((line) => line.remove());
    const { min, max } = plot.scales.x;
    for (const { index, starts } of runs) {
      for (const start of starts) {
        if (!(start[over] >= min && start[over] <= max)) continue;
        const line = document.createElement("div");
        line.className = "mark";
        line.title = several ? `${data.runs[index].name}: ${start.said}` : start.said;
        line.style.left = `${plot.valToPos(start[over], "x")}px`;
        if (several) line.style.color = colour(index);
        plot.over.append(line);
      }
    }
  };

  const draw = (box) => {
    const name = box.dataset.curve;
    const over = form.elements.over.value;
    const tables = [];
    const interrupted = [];
    const series = [{ label: over, value: (_, v) => (v == null ? "–" : over === "time" ? duration(v) : String(v)) }];
    let lowest = Infinity;
    data.runs.forEach((run, index) => {
      const curve = run.curves[name];
      if (!curve) return;
      interrupted.push({ index, starts: run.starts });
      // Clocks may have been set back; uPlot wants ascending values.
      const order = curve[over].map((_, at) => at).sort((a, b) => curve[over][a] - curve[over][b]);
      tables.push([order.map((at) => curve[over][at]), order.map((at) => curve.value[at])]);
      for (const value of curve.value) lowest = Math.min(lowest, value);
      series.push({
        label: several ? run.name : name,
        stroke: colour(index),
        width: 1.5,
        spanGaps: true,
        points: { show: curve.value.length < 3, size: 5 },
        value: (_, value) => figure(value),
      });
    });
    const logarithmic = form.elements.log.checked && lowest > 0;
    const format = (_, values) => values.map((value) => (value == null ? "" : over === "time" ? duration(value) : String(value)));
    const options = {
      width: box.clientWidth || 400,
      height: 220,
      cursor: { drag: { x: true, y: false }, sync: { key: over } },
      legend: { show: data.runs.length <= 12 && (several || !printing()), live: !printing() },
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [axis({ values: format }), axis({ size: 64, values: (_, values) => values.map((value) => (value == null ? "" : figure(value))) })],
      series,
      hooks: { draw: [(plot) => mark(plot, interrupted, over)] },
    };
    keep(box, new uPlot(options, uPlot.join(tables), box));
  };

  // ---- The ranks: in which share of the time each waits for others
  const waits = () => {
    const box = document.getElementById("waits");
    if (!box || !data.ranks || !data.ranks.time.length) return;
    const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
    const options = {
      width: box.clientWidth || 400,
      height: 220,
      cursor: { drag: { x: true, y: false }, sync: { key: "time" } },
      legend: { live: !printing() },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high || 0, 0.01)] } },
      axes: [axis({ values: (_, values) => values.map((value) => (value == null ? "" : duration(value))) }), axis({ size: 64, values: (_, values) => values.map(percent) })],
      series: [
        { label: "time", value: (_, value) => (value == null ? "–" : duration(value)) },
        ...data.ranks.series.map(({ label }, index) => ({
          label,
          stroke: colour(index),
          width: 1.5,
          spanGaps: false,
          points: { show: data.ranks.time.length < 30, size: 5 },
          value: (_, value) => percent(value),
        })),
      ],
    };
    keep(box, new uPlot(options, [data.ranks.time, ...data.ranks.series.map(({ values }) => values)], box));
  };

  // ---- Parallel coordinates: one line for each run, from setting to setting and on to the results
  const parallel = () => {
    const box = document.querySelector("#parallel .plot");
    if (!box || !data.axes || data.axes.length < 2) return;
    box.parentElement.hidden = false;
    const scales = data.axes.map(({ values }) => {
      const numbers = values.map((value) => (value === "" || value === "nan" ? NaN : Number(value)));
      if (numbers.filter((value) => !Number.isNaN(value)).length > 0 && values.every((value, at) => value === "" || value === "nan" || !Number.isNaN(numbers[at]))) {
        const known = numbers.filter((value) => !Number.isNaN(value));
        const [low, high] = [Math.min(...known), Math.max(...known)];
        return { low: figure(low), high: figure(high), at: numbers.map((v) => (Number.isNaN(v) ? null : high > low ? (v - low) / (high - low) : 0.5)) };
      }
      const words = [...new Set(values)].sort();
      return { low: words[0], high: words[words.length - 1], at: values.map((value) => (words.length > 1 ? words.indexOf(value) / (words.length - 1) : 0.5)) };
    });
    const rows = data.runs.map((_, run) => scales.map((scale) => scale.at[run]));
    const label = (plot) => {
      const { ctx } = plot;
      const fits = Math.max(4, Math.floor(plot.width / scales.length / 7));
      ctx.save();
      ctx.textBaseline = "alphabetic";
      ctx.fillStyle = theme("--soft");
      ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      scales.forEach((scale, index) => {
        const x = plot.valToPos(index, "x", true);
        ctx.textAlign = index === 0 ? "left" : index === scales.length - 1 ? "right" : "center";
        ctx.fillText(String(scale.high).slice(0, fits), x, plot.bbox.top - 6 * devicePixelRatio);
        ctx.fillText(String(scale.low).slice(0, fits), x, plot.bbox.top + plot.bbox.height + 14 * devicePixelRatio);
      });
      ctx.restore();
    };
    const names = data.axes.map(({ name }) => name);
    const options = {
      width: box.clientWidth || 400,
      height: 280,
      padding: [28, 56, 0, 56],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: [0, names.length - 1] }, y: { range: [0, 1] } },
      axes: [
        axis({ splits: () => names.map((_, index) => index), values: (plot) => names.map((name) => name.slice(0, Math.max(4, Math.floor(plot.width / names.length / 7)))), gap: 20, size: 52 }),
        { show: false },
      ],
      series: [{}, ...data.runs.map((run, index) => ({ label: run.name, stroke: colour(index), width: 1.5, spanGaps: false, points: { show: true, size: 4 } }))],
      hooks: { draw: [label] },
    };
    keep(box, new uPlot(options, [names.map((_, index) => index), ...rows], box));
  };

  const redraw = () => {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    if (form) document.querySelectorAll(".plot[data-curve]").forEach(draw);
    waits();
    parallel();
    document.querySelectorAll(".swatch[data-run]").forEach((swatch) => {
      swatch.style.background = colour(Number(swatch.dataset.run));
    });
  };
  if (form) {
    form.addEventListener("change", redraw);
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  dark.addEventListener("change", redraw);
  // A curve is an image: draw it as wide as the paper, in the colours of paper.
  for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printing", on);
      redraw();
    });
  }
  redraw();
})();
