// All runs in a table: sort, filter, pick several to compare.
import { elapsed, h, number, percent, time } from "../dom.js";

const MOST_COMPARED = 32;
/** Rows at once: with words to filter by, nobody scrolls through more. */
const MOST_SHOWN = 300;
const COLUMNS = [
  { key: "name", title: "Run" },
  { key: "state", title: "State" },
  { key: "step", title: "Step", number: true },
  { key: "accuracy", title: "Accuracy", number: true, say: percent },
  { key: "reward", title: "Reward", number: true, say: number },
  { key: "loss", title: "Loss", number: true, say: number, less: true },
  { key: "samples_per_s", title: "Samples/s", number: true, say: number, less: true },
  { key: "seconds", title: "Time", number: true, say: elapsed, less: true },
  { key: "cost", title: "Cost", number: true, sayOf: cost, less: true },
  { key: "recipe", title: "Recipe", less: true },
  { key: "algorithm", title: "Algorithm", less: true },
  { key: "started", title: "Started (UTC)", say: time, less: true },
];

/** Of what the run reserved, as long as it lasted. */
function cost({ cost: hours, cost_unit: unit }) {
  return hours === null || hours === undefined ? "–" : `${number(hours, 3)} ${unit}`;
}

/** Where a line leads: to the tenants of a server, to the charts of any other run. */
const addressOf = (line) => `#/${line.is_server ? "tenants" : "run"}/${encodeURIComponent(line.id)}`;

/** Rows that match every word, in any column. */
export function matching(lines, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return lines.filter((line) => {
    const text = [line.name, line.id, line.run_id, line.state, line.recipe, line.algorithm, line.model, line.error].join(" ").toLowerCase();
    return wanted.every((word) => text.includes(word));
  });
}

export function sorted(lines, key, down) {
  const value = (line) => line[key];
  return [...lines].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1; // what is not known comes last, whichever way
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (down ? -1 : 1);
  });
}

export class RunsPage {
  constructor(app) {
    this.app = app;
    this.title = "";
    this.key = "started";
    this.down = true;
    this.words = "";
    this.picked = new Set();
    this.at = 0;
    this.search = h("input", { type: "search", placeholder: "filter: words of a name, id, recipe, state …", "aria-label": "filter", oninput: () => this.filter() });
    this.compare = h("button", { type: "button", disabled: true, onclick: () => this.overlay() }, "Compare");
    this.count = h("span.faint");
    this.body = h("tbody");
    this.head = h("tr");
    this.element = h("div", {},
      h("div.bar", {}, this.search, this.compare, this.count),
      h("div.scroll", {}, h("table.runs", {}, h("thead", {}, this.head), this.body)));
    this.show();
  }

  changed() {
    this.show();
  }

  filter() {
    this.words = this.search.value;
    this.at = 0;
    this.show();
  }

  show() {
    const lines = sorted(matching([...this.app.lines.values()], this.words), this.key, this.down);
    this.lines = lines;
    this.at = Math.max(0, Math.min(this.at, lines.length - 1, MOST_SHOWN - 1));
    this.head.replaceChildren(h("th", {}), ...COLUMNS.map((column) => h(`th${column.number ? ".number" : ""}${column.less ? ".less" : ""}`, {
      "aria-sort": column.key === this.key ? (this.down ? "descending" : "ascending") : null,
    }, h("button", { type: "button", onclick: () => this.sort(column) }, column.title, column.key === this.key ? (this.down ? " ↓" : " ↑") : ""))));
    this.fill(lines.slice(0, MOST_SHOWN));
    if (!lines.length) this.body.append(h("tr", {}, h("td.wide", { colspan: COLUMNS.length + 1 }, !this.app.isListed ? "…" : this.app.lines.size ? "No run matches." : "There is no run here yet. `penstock run recipe=arithmetic` makes one.")));
    const more = lines.length > MOST_SHOWN ? `, the first ${MOST_SHOWN} are shown` : "";
    this.count.textContent = `${lines.length} of ${this.app.lines.size} runs${more}`;
    this.compare.disabled = this.picked.size < 2;
    this.compare.textContent = this.picked.size ? `Compare ${this.picked.size}` : "Compare";
  }

  /** The rows anew; what has the focus keeps it. */
  fill(lines) {
    const held = this.body.contains(document.activeElement) ? document.activeElement : null;
    const run = held?.closest("tr")?.dataset.run;
    this.body.replaceChildren(...lines.map((line, index) => this.row(line, index)));
    if (run) this.body.querySelector(`tr[data-run="${CSS.escape(run)}"] ${held.tagName}`)?.focus({ preventScroll: true });
  }

  row(line, index) {
    const cells = COLUMNS.map((column) => h(`td${column.number ? ".number" : ""}${column.less ? ".less" : ""}`, {}, this.cell(line, column)));
    return h(`tr${index === this.at ? ".at" : ""}`, { "data-run": line.id }, h("td", {}, h("input", {
      type: "checkbox", checked: this.picked.has(line.id), "aria-label": `compare ${line.name}`, onchange: () => this.pick(line.id),
    })), cells);
  }

  cell(line, { key, say, sayOf }) {
    if (key === "name") return h("a", { href: addressOf(line), title: line.run_id && `id ${line.run_id}` }, line.id.includes("/") ? line.id : line.name);
    if (key === "state") return h(`span.state.${line.state}`, { title: line.error }, line.state);
    if (key === "step") {
      if (line.step === null) return "–";
      const bar = line.state === "running" && line.max_steps ? h("progress.progress.less", { value: line.step, max: line.max_steps }) : null;
      return h("span", {}, bar, ` ${line.step}`, h("span.less", {}, ` of ${line.max_steps ?? "?"}`));
    }
    if (sayOf) return sayOf(line);
    return say ? say(line[key]) : (line[key] ?? "–");
  }

  sort(column) {
    this.down = this.key === column.key ? !this.down : Boolean(column.number);
    this.key = column.key;
    this.show();
  }

  pick(id) {
    if (!this.picked.delete(id)) this.picked.add(id);
    this.show();
  }

  pickAll() {
    const shown = this.lines.slice(0, MOST_COMPARED).map((line) => line.id);
    this.picked = shown.every((id) => this.picked.has(id)) ? new Set() : new Set(shown);
    this.show();
  }

  overlay() {
    location.hash = `#/compare/${[...this.picked].map(encodeURIComponent).join(",")}`;
  }

  keys = {
    j: ["next run", () => this.move(1)],
    k: ["run before", () => this.move(-1)],
    Enter: ["open it", () => this.lines[this.at] && (location.hash = addressOf(this.lines[this.at]))],
    x: ["pick it for a comparison", () => this.lines[this.at] && this.pick(this.lines[this.at].id)],
    a: ["pick all that are shown, or none", () => this.pickAll()],
    c: ["compare those that are picked", () => this.picked.size > 1 && this.overlay()],
    "/": ["filter", () => this.search.focus()],
  };

  move(by) {
    this.at += by;
    this.show();
    this.body.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
  }

  close() {}
}
