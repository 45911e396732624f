"use strict";
// Live regions, curves and logs. Text from hosts reaches the page as escaped HTML of the server or as textContent.

// The palette of Okabe and Ito, in the order of the best contrast on a light and on a dark page.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DARK_COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const LINES = ["solid", "dashed", "dotted", "double"];
const LOG_LINES = 5000; // that the page keeps
const RANKS = 16; // curves of step times
const state = document.getElementById("live-state");

function replaceRegion(id, html) {
  const old = document.getElementById(id);
  const holder = document.createElement("template");
  holder.innerHTML = html.trim();
  const fresh = holder.content.firstElementChild;
  if (!old) return fresh;
  if (old.isEqualNode(fresh)) return old; // such as the first message of a page: the server has just rendered it
  const keyed = (parent) => [...parent.querySelectorAll("details")].map((item, place) => [item.dataset.key || place, item]);
  const open = new Map(keyed(old).map(([key, item]) => [key, item.open]));
  for (const [key, item] of keyed(fresh)) item.open = open.get(key) ?? item.open;
  const selector = "a, button, input, select, summary, [tabindex]";
  const active = document.activeElement, focused = [...old.querySelectorAll(selector)].indexOf(active);
  // A row does not scroll, and a query of its position would make the browser lay out the page for each of many rows.
  const scrolled = old.tagName === "TR" ? null : [old.scrollLeft, old.scrollTop];
  for (const field of old.querySelectorAll("input[id], select[id]")) {
    const next = fresh.querySelector(`#${CSS.escape(field.id)}`);
    if (next) next.value = field.value;
  }
  old.replaceWith(fresh);
  if (scrolled) [fresh.scrollLeft, fresh.scrollTop] = scrolled;
  showNewest(fresh);
  if (focused >= 0) (active.id && document.getElementById(active.id) || fresh.querySelectorAll(selector)[focused])?.focus({ preventScroll: true });
  return fresh;
}

// Progress that is longer than its box: the newest line counts.
function showNewest(parent) {
  for (const box of parent.querySelectorAll(".action-lines")) box.scrollTop = box.scrollHeight;
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
      if (element && element === place) place = place.nextElementSibling;
      else if (element) parent.insertBefore(element, place);
    }
  }
  hideEmptyTables();
}

function hideEmptyTables() {
  for (const box of document.querySelectorAll("main > .scroll")) box.hidden = !box.querySelector("tbody > tr");
}

let source = null;

// Connects to the server, or reconnects with another log: a browser permits few connections, so a page has one.
function connect(log = {}) {
  source?.close();
  const query = new URLSearchParams(log).toString();
  source = new EventSource(document.body.dataset.live + (query ? `&${query}` : ""));
  const opened = source;
  source.addEventListener("open", () => { state.textContent = "live"; state.className = "on"; logs?.begin(); });
  source.addEventListener("error", () => {
    // The browser reconnects automatically, unless the server has refused.
    const refused = opened.readyState === EventSource.CLOSED;
    state.textContent = refused ? "no longer logged in: reload the page" : "the dashboard does not answer: is it still running?";
    state.className = "off";
  });
  source.addEventListener("regions", (event) => showRegions(JSON.parse(event.data)));
  source.addEventListener("series", (event) => charts?.take(JSON.parse(event.data)));
  source.addEventListener("log", (event) => logs?.take(JSON.parse(event.data)));
}

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function colour(place) {
  const colours = matchMedia("(prefers-color-scheme: dark)").matches ? DARK_COLOURS : COLOURS;
  return colours[place % colours.length];
}

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
      for (const [name, values] of Object.entries(series.metrics)) (known.metrics[name] ||= Array(series.first).fill(null)).push(...values);
      known.evals = series.evals;
    } else {
      this.runs.set(series.run, series);
    }
    this.draw(false);
  }

  // Returns { label, steps, values, colour, dash, points } of every curve of a chart. Runs that are compared have a colour
  // each; ranks are those of the first run only.
  curves(chart) {
    const found = [], compared = this.names.length > 1, byRank = ["step_seconds", "comm_share", "mfu"].includes(chart);
    this.names.forEach((name, number) => {
      const series = this.runs.get(name), column = series?.columns[chart];
      if (!series || !series.columns.step.length || (byRank && found.length)) return;
      const steps = series.columns.step, dashed = compared ? 1 : 0;
      if (byRank) {
        const factor = chart === "step_seconds" ? 1 : 100;
        const ranks = Math.min(RANKS, Math.max(0, ...column.map((one) => one ? one.length : 0)));
        for (let rank = 0; rank < ranks; rank++) {
          const values = column.map((one) => one?.[rank] === undefined ? null : one[rank] * factor);
          found.push({ label: `rank ${rank}`, steps, values, colour: rank, dash: Math.floor(rank / COLOURS.length) });
        }
        return;
      }
      const prefix = compared ? `${name} ` : "";
      if (!column) {
        // The metrics of a method: that of the chart's name, and its parts, such as reward/NAME.
        const parts = Object.entries(series.metrics).filter(([part]) => part === chart || part.startsWith(`${chart}/`) || part.startsWith(`${chart}_`));
        parts.forEach(([part, values], place) => {
          const label = part === chart ? (parts.length > 1 ? "all" : "") : part.slice(chart.length + 1);
          found.push({ label: prefix + label, steps, values, colour: compared ? number : place, dash: compared ? place : Math.floor(place / COLOURS.length) });
        });
        return;
      }
      if (column.some((value) => value !== null))
        found.push({ label: prefix + (chart === "loss" ? "training" : ""), steps, values: column, colour: number, dash: 0 });
      if (chart === "loss" && series.evals.length)
        found.push({ label: `${prefix}held out`, steps: series.evals.map((one) => one[0]), values: series.evals.map((one) => one[1]), colour: compared ? number : 1, dash: dashed, points: true });
    });
    return found;
  }

  draw(again) {
    let any = false;
    for (const figure of this.section.querySelectorAll("[data-chart]")) {
      const curves = this.curves(figure.dataset.chart);
      figure.hidden = !curves.length;
      if (!curves.length) continue;
      any = true;
      // The unit of the values; that of the axis is in the title.
      const unit = { step_seconds: " s", comm_share: " %", mfu: " %", tokens_per_second: " tokens/s" }[figure.dataset.chart] || "";
      const data = uPlot.join(curves.map(({ steps, values }) => [steps, values]));
      const key = curves.map(({ label }) => label).join("\n");
      const plot = this.plots.get(figure);
      if (plot && plot.key === key && !again) plot.chart.setData(data);
      else {
        plot?.chart.destroy();
        this.plots.set(figure, { key, chart: this.plot(figure, curves, data) });
      }
      Object.assign(this.plots.get(figure), { curves, unit });
      this.describe(figure);
    }
    document.getElementById("charts-empty").hidden = any;
  }

  // Writes the values under the pointer above a chart, or the newest ones.
  describe(figure) {
    const { chart, curves, unit } = this.plots.get(figure) || {};
    if (!curves) return;
    const place = chart.cursor.idx, caption = figure.querySelector(".latest");
    caption.replaceChildren(place == null ? "" : `step ${shown(chart.data[0][place])}: `);
    curves.forEach(({ label, colour: tone, dash }, number) => {
      const values = chart.data[number + 1];
      let at = place ?? values.length - 1;
      while (at > 0 && values[at] == null) at--;
      const entry = document.createElement("span"), line = document.createElement("span");
      line.className = "line";
      line.style.borderTopColor = colour(tone);
      line.style.borderTopStyle = LINES[dash % LINES.length];
      const several = curves.length > 1;
      entry.append(several ? line : "", `${several ? `${label.trim()} ` : ""}${shown(values[at])}${unit}`);
      caption.append(entry);
    });
  }

  plot(figure, curves, data) {
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const series = curves.map(({ label, colour: tone, dash, points }) => ({
      label, width: 2, spanGaps: true, stroke: colour(tone), dash: DASHES[dash % DASHES.length],
      points: { show: Boolean(points), size: 7 },
    }));
    const target = figure.querySelector(".plot");
    return new uPlot({
      width: Math.max(200, target.clientWidth), height: figure.classList.contains("wide") ? 280 : 200,
      scales: { x: { time: false } }, legend: { show: false }, hooks: { setCursor: [() => this.describe(figure)] },
      axes: [{ ...axis, label: "step", size: 26, labelSize: 18, labelFont: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map((one) => Number.isInteger(one) ? one.toLocaleString("en") : "") }, { ...axis, size: 62, values: (_, ticks) => ticks.map(shown) }],
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
  }

  // The live request to the server: the selected log.
  get wanted() {
    const { host, file } = this.select.selectedOptions[0].dataset;
    return file ? { log: "1", host, file } : { log: "1" };
  }

  show() {
    this.turn++;
    this.log.replaceChildren();
    this.state.textContent = "";
    if (this.search.value) this.find(this.turn);
    else connect(this.wanted);
  }

  async find(turn) {
    connect();
    const all = [...this.select.options].filter((one) => one.dataset.file);
    const chosen = this.select.selectedOptions[0];
    const files = chosen.dataset.file ? [chosen] : all.filter((one) => one.dataset.label);
    let found = 0, skipped = 0;
    try {
      for (const { dataset } of files) {
        const query = new URLSearchParams({ host: dataset.host, file: dataset.file, search: this.search.value });
        const reply = await fetch(`/runs/${encodeURIComponent(this.form.dataset.run)}/log?${query}`);
        const answer = await reply.json().catch(() => ({ error: `the dashboard answered ${reply.status}` }));
        if (turn !== this.turn) return;
        if (answer.error) throw new Error(answer.error);
        this.append(answer.lines.map((line) => [files.length > 1 ? dataset.label : "", line]));
        found += answer.found;
        skipped += answer.skipped;
      }
      this.state.textContent = `${found} ${found === 1 ? "line contains" : "lines contain"} the text` + (skipped ? "; the beginning of the log was not searched" : "");
    } catch (error) {
      if (turn === this.turn) this.state.textContent = error.message;
    }
  }

  // The server sends a log from its beginning on each connection.
  begin() { if (!this.search.value) this.log.replaceChildren(); }

  take({ lines, error }) {
    if (this.search.value) return;
    this.append(lines);
    this.state.textContent = error || (this.log.childNodes.length ? "live" : "the log is empty");
  }

  append(lines) {
    const bottom = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    for (const [label, line] of lines) {
      const row = document.createElement("div");
      if (label) {
        const name = document.createElement("span");
        name.className = "rank";
        name.dataset.rank = Number(label.split(" ")[1]) % 6;
        name.textContent = label;
        row.append(name, " ");
      }
      row.append(line);
      this.log.append(row);
    }
    while (this.log.childNodes.length > LOG_LINES) this.log.firstChild.remove();
    if (bottom) this.log.scrollTop = this.log.scrollHeight;
  }
}

// Asks one or two models, and shows their answers side by side while they are generated.
class Questions {
  constructor(form) {
    this.form = form;
    this.stop = document.getElementById("ask-stop");
    this.answers = document.getElementById("ask-answers");
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    this.stop.addEventListener("click", () => this.end.abort());
  }

  async ask() {
    this.end?.abort();
    const end = this.end = new AbortController();
    const models = [...this.form.querySelectorAll("select")].map((one) => one.value).filter(Boolean);
    const cards = [...new Set(models)].map((model) => [model, document.getElementById("ask-answer").content.firstElementChild.cloneNode(true)]);
    this.answers.replaceChildren(...cards.map(([, card]) => card));
    this.stop.hidden = false;
    await Promise.all(cards.map(([model, card]) => this.show(model, card, end.signal)));
    if (this.end === end) this.stop.hidden = true;
  }

  async show(model, card, signal) {
    const [title, text, status] = card.children;
    title.textContent = model;
    text.ariaLabel = `Answer of ${model}`;
    status.textContent = "waits for the first token";
    const body = new URLSearchParams(new FormData(this.form));
    body.set("model", model);
    let where = "", ended = false;
    const take = (line) => {
      if (line.host) where = `${line.host}: `;
      if (line.text) {
        const bottom = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
        text.append(line.text);
        if (bottom) text.scrollTop = text.scrollHeight;
        if (status.textContent !== "answers") status.textContent = "answers";
      }
      if (line.end || line.error) { ended = true; status.textContent = where + (line.end || `error: ${line.error}`); status.className = line.error ? "cause" : "hint"; }
    };
    try {
      const reply = await fetch(this.form.action, { method: "POST", body, signal });
      if (!reply.ok) throw new Error(await reply.text());
      let rest = "";
      for (const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
        const { value, done } = await reader.read();
        const lines = (rest + (value || "")).split("\n");
        rest = lines.pop();
        for (const line of lines) take(JSON.parse(line));
        if (done) break;
      }
      if (!ended) throw new Error("the answer was cut off: reload the page");
    } catch (error) {
      status.textContent = signal.aborted ? "stopped" : error.message;
      status.className = signal.aborted ? "hint" : "cause";
    }
  }
}

const section = document.getElementById("charts");
const charts = section ? new Charts(section) : null;
const form = document.querySelector("form.logs");
const logs = form ? new Logs(form) : null;
const asking = document.getElementById("ask");
if (asking) new Questions(asking);
showNewest(document);
hideEmptyTables();
connect(logs ? logs.wanted : {});
window.addEventListener("pagehide", () => source.close());
