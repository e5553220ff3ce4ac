// The engine's state as small charts, from /metrics. Rates are over the time between two readings.

const PERIOD = 1000;
const KEPT = 120;
const SVG = "http://www.w3.org/2000/svg";
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const number = (value) => value.toFixed(0);
const rate = (value) => `${value.toFixed(1)} /s`;
const milliseconds = (value) => `${(1000 * value).toFixed(1)} ms`;

const gauge = (name) => (now) => now[name] ?? null;
const perSecond = (name) => (now, before, seconds) => (now[name] - before[name]) / seconds;
/** What was added to one counter for each that was added to another; null while nothing was. */
const ratio = (part, whole) => (now, before) => {
  const added = now[whole] - before[whole];
  return added > 0 ? (now[part] - before[part]) / added : null;
};

const CHARTS = [
  ["Requests running", gauge("num_requests_running"), number],
  ["Requests waiting", gauge("num_requests_waiting"), number],
  ["Cache pages in use", gauge("kv_cache_usage_perc"), percent, 1],
  ["Prefix cache hits", ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), percent, 1],
  ["Drafts accepted", ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"), percent, 1],
  ["Step time", ratio("engine_step_seconds_total", "engine_steps_total"), milliseconds],
  ["Tokens generated", perSecond("generation_tokens_total"), rate],
  ["Prompt tokens", perSecond("prompt_tokens_total"), rate],
];

/** The samples by name without its prefix, those with more labels than the model left out. */
export function readMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^[A-Za-z_]\w*:(\w+)\{model_name="(?:[^"\\]|\\.)*"\} (\S+)$/.exec(line);
    if (found) values[found[1]] = Number(found[2]);
  }
  return values;
}

class Chart {
  constructor(title, write, top) {
    this.write = write;
    this.top = top;
    this.title = title;
    this.values = [];
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.shown = document.createElement("output");
    this.shown.setAttribute("aria-live", "off");
    caption.append(title, this.shown);
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 100`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    const frame = document.createElement("div");
    frame.className = "frame";
    this.scale = document.createElement("span");
    this.scale.className = "most";
    const zero = document.createElement("span");
    zero.className = "zero";
    zero.textContent = "0";
    frame.append(this.svg, this.scale, zero);
    figure.append(caption, frame);
    document.getElementById("charts").append(figure);
  }

  add(value) {
    this.values.push(Number.isFinite(value) ? value : null);
    if (this.values.length > KEPT) this.values.shift();
    const known = this.values.filter((each) => each !== null);
    const most = this.top ?? Math.max(...known, 0);
    const now = known.length ? this.write(known.at(-1)) : "none yet";
    this.shown.textContent = now;
    const range = known.length ? `now ${now}, at most ${this.write(Math.max(...known))}` : now;
    this.svg.setAttribute("aria-label", `${this.title}: ${range} in the last two minutes`);
    this.scale.textContent = this.write(most || 1);
    this.draw(most || 1);
  }

  draw(most) {
    const start = KEPT - this.values.length;
    const runs = [[]];
    this.values.forEach((value, index) => {
      if (value === null) runs.push([]);
      else runs.at(-1).push(`${start + index},${(97 - (94 * value) / most).toFixed(1)}`);
    });
    this.svg.replaceChildren(...runs.filter((run) => run.length).map((run) => {
      const line = document.createElementNS(SVG, "polyline");
      // A single point has no length; a short dash makes it seen.
      const [x, y] = run[0].split(",");
      line.setAttribute("points", run.length > 1 ? run.join(" ") : `${x - 0.5},${y} ${x},${y}`);
      return line;
    }));
  }
}

export function startEngine(ask) {
  const charts = CHARTS.map(([title, read, write, top]) => ({ read, chart: new Chart(title, write, top) }));
  let before = null, beforeAt = 0, isReading = false;

  async function read() {
    // A page that nobody sees asks for nothing, and a slow answer is waited for.
    if (isReading || document.hidden) return;
    isReading = true;
    const status = document.getElementById("engine-status");
    try {
      const response = await ask("metrics");
      if (!response.ok) throw new Error(`/metrics answered ${response.status}`);
      const now = readMetrics(await response.text()), at = performance.now();
      const seconds = (at - beforeAt) / 1000;
      for (const { read, chart } of charts) chart.add(read(now, before ?? now, seconds));
      [before, beforeAt] = [now, at];
      status.textContent = "Read from /metrics once a second; each chart holds the last two minutes.";
    } catch (error) {
      status.textContent = `The engine's state cannot be read: ${error.message}`;
    } finally {
      isReading = false;
    }
  }

  // From the start, so that whoever opens the tab sees what has been.
  read();
  setInterval(read, PERIOD);
}
