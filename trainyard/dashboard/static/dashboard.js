"use strict";
// Live regions, curves and logs. Text from hosts reaches the page as escaped HTML of the server or as textContent.

// The palette of Okabe and Ito, in the order of the best contrast.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const LOG_LINES = 5000; // that the page keeps
const RANKS = 16; // curves of step times
const state = document.getElementById("live-state");

function replaceRegion(id, html) {
  const old = document.getElementById(id);
  const holder = document.createElement("template");
  holder.innerHTML = html.trim();
  const fresh = holder.content.firstElementChild;
  if (!old) return fresh;
  const open = [...old.querySelectorAll("details")].map((item) => item.open);
  fresh.querySelectorAll("details").forEach((item, place) => { item.open = open[place] || false; });
  const selector = "a, button, input, summary, [tabindex]";
  const focused = [...old.querySelectorAll(selector)].indexOf(document.activeElement);
  const scrolled = [old.scrollLeft, old.scrollTop];
  old.replaceWith(fresh);
  [fresh.scrollLeft, fresh.scrollTop] = scrolled;
  if (focused >= 0) fresh.querySelectorAll(selector)[focused]?.focus({ preventScroll: true });
  return fresh;
}

function showRegions(message) {
  for (const [group, ids] of Object.entries(message.order)) {
    const parent = document.querySelector(`[data-group="${group}"]`);
    if (!parent) continue;
    const wanted = new Set(ids);
    for (const child of [...parent.children]) if (!wanted.has(child.id)) child.remove();
    let place = parent.firstElementChild;
    for (const id of ids) {
      let element = document.getElementById(id);
      const html = message.html[id];
      if (html !== undefined) {
        const next = place && place.id === id ? place.nextElementSibling : place;
        const fresh = replaceRegion(id, html);
        if (!element) parent.insertBefore(fresh, place);
        else if (place === element) { place = next; continue; }
        element = fresh;
      }
      if (element === place) place = place.nextElementSibling;
      else if (element) parent.insertBefore(element, place);
    }
  }
}

function connect() {
  const source = new EventSource(document.body.dataset.live);
  source.addEventListener("open", () => { state.textContent = "live"; state.className = ""; });
  source.addEventListener("error", () => {
    // The browser connects again by itself, unless the server has refused.
    const refused = source.readyState === EventSource.CLOSED;
    state.textContent = refused ? "no longer logged in: reload the page" : "the dashboard does not answer: is it still running?";
    state.className = "off";
  });
  source.addEventListener("regions", (event) => showRegions(JSON.parse(event.data)));
  source.addEventListener("series", (event) => charts?.take(JSON.parse(event.data)));
  window.addEventListener("pagehide", () => source.close());
}

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function shown(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

class Charts {
  constructor(section) {
    this.section = section;
    this.runs = new Map(); // run: its records
    this.names = [section.dataset.run, ...section.dataset.others.split(",").filter(Boolean)];
    this.plots = new Map();
    for (const name of this.names.slice(1)) this.fetch(name);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
    new ResizeObserver(() => this.resize()).observe(section);
  }

  async fetch(name) {
    const reply = await fetch(`/runs/${encodeURIComponent(name)}/series`);
    if (reply.ok) this.take(await reply.json());
  }

  take(series) {
    const known = this.runs.get(series.run);
    if (known && series.first > 0 && series.generation === known.generation) {
      for (const [name, values] of Object.entries(series.columns)) known.columns[name].push(...values);
      known.evals = series.evals;
    } else {
      this.runs.set(series.run, series);
    }
    this.draw(false);
  }

  // Returns [label, steps, values, unit] of every curve of a chart.
  curves(chart) {
    const found = [];
    for (const name of this.names) {
      const series = this.runs.get(name);
      if (!series || !series.columns.step.length) continue;
      const steps = series.columns.step;
      const prefix = this.names.length > 1 ? `${name} ` : "";
      if (chart === "step_seconds") {
        const ranks = Math.min(RANKS, Math.max(0, ...series.columns[chart].map((one) => one ? one.length : 0)));
        if (ranks < 1) continue;
        for (let rank = 0; rank < ranks; rank++)
          found.push([`${prefix}rank ${rank}`, steps, series.columns[chart].map((one) => one?.[rank] ?? null)]);
      } else {
        if (series.columns[chart].some((value) => value !== null))
          found.push([`${prefix}${chart === "loss" ? "training" : chart.replaceAll("_", " ")}`, steps, series.columns[chart]]);
        if (chart === "loss" && series.evals.length)
          found.push([`${prefix}held out`, series.evals.map((one) => one[0]), series.evals.map((one) => one[1]), true]);
      }
    }
    return found;
  }

  draw(again) {
    let any = false;
    for (const figure of this.section.querySelectorAll("[data-chart]")) {
      const curves = this.curves(figure.dataset.chart);
      figure.hidden = !curves.length;
      if (!curves.length) continue;
      any = true;
      const unit = { step_seconds: " s", tokens_per_second: " tokens/s" }[figure.dataset.chart] || "";
      figure.querySelector(".latest").textContent = curves.slice(0, 6)
        .map(([label, , values]) => `${curves.length > 1 ? label + " " : ""}${shown(values.at(-1))}${unit}`).join(" · ");
      const data = uPlot.join(curves.map(([, steps, values]) => [steps, values]));
      const key = curves.map(([label]) => label).join("\n");
      const plot = this.plots.get(figure);
      if (plot && plot.key === key && !again) plot.chart.setData(data);
      else {
        plot?.chart.destroy();
        this.plots.set(figure, { key, chart: this.plot(figure, curves, data, unit) });
      }
    }
    document.getElementById("charts-empty").hidden = any;
  }

  plot(figure, curves, data, unit) {
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const series = curves.map(([label, , , points], place) => ({
      label, width: 2, spanGaps: true, stroke: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length],
      points: { show: Boolean(points), size: 7 }, value: (_, value) => shown(value) + unit,
    }));
    const target = figure.querySelector(".plot");
    return new uPlot({
      width: Math.max(200, target.clientWidth), height: figure.classList.contains("wide") ? 260 : 180,
      scales: { x: { time: false } }, legend: { show: curves.length > 1 },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((one) => Number.isInteger(one) ? String(one) : "") }, { ...axis, size: 62, values: (_, ticks) => ticks.map(shown) }],
      series: [{ label: "step" }, ...series],
    }, data, target);
  }

  resize() {
    for (const [figure, { chart }] of this.plots) {
      const width = figure.querySelector(".plot").clientWidth;
      if (width && Math.abs(width - chart.width) > 1) chart.setSize({ width, height: chart.height });
    }
  }
}

class Logs {
  constructor(form) {
    this.form = form;
    this.select = form.querySelector("select");
    this.search = form.querySelector("input");
    this.state = document.getElementById("log-state");
    this.log = document.getElementById("log");
    this.turn = 0;
    this.select.addEventListener("change", () => this.show());
    form.addEventListener("submit", (event) => { event.preventDefault(); this.show(); });
    this.search.addEventListener("input", () => { if (!this.search.value) this.show(); });
    this.show();
  }

  async ask(values) {
    const { host, file } = this.select.selectedOptions[0].dataset;
    const reply = await fetch(`/runs/${encodeURIComponent(this.form.dataset.run)}/log?${new URLSearchParams({ host, file, ...values })}`);
    const answer = await reply.json().catch(() => ({ error: `the dashboard answered ${reply.status}` }));
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  async show() {
    const turn = ++this.turn;
    const text = this.search.value;
    this.log.replaceChildren();
    let since = "";
    try {
      if (text) {
        const answer = await this.ask({ search: text });
        if (turn !== this.turn) return;
        this.append(answer.lines);
        this.state.textContent = `${answer.found} ${answer.found === 1 ? "line contains" : "lines contain"} the text` + (answer.skipped ? "; the beginning of the log was not searched" : "");
        return;
      }
      while (turn === this.turn) {
        if (!document.hidden) {
          const answer = await this.ask(since === "" ? {} : { since });
          if (turn !== this.turn) return;
          if (since !== "" && answer.offset < since) this.log.replaceChildren();
          this.append(answer.lines);
          since = answer.offset;
          this.state.textContent = this.log.childNodes.length ? "" : "the log is empty";
        }
        await new Promise((done) => setTimeout(done, 1500));
      }
    } catch (error) {
      if (turn === this.turn) this.state.textContent = error.message;
    }
  }

  append(lines) {
    const bottom = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    for (const line of lines) this.log.append(document.createTextNode(line + "\n"));
    while (this.log.childNodes.length > LOG_LINES) this.log.firstChild.remove();
    if (bottom) this.log.scrollTop = this.log.scrollHeight;
  }
}

const section = document.getElementById("charts");
const charts = section ? new Charts(section) : null;
const form = document.querySelector("form.logs");
if (form) new Logs(form);
connect();
