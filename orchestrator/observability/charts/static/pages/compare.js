// Several runs in the same charts, and in what they were told differently.
import { ask } from "../api.js";
import { Board } from "../board.js";
import { joined } from "../chart.js";
import { color } from "../colors.js";
import { h, number, percent } from "../dom.js";
import { curveOf, within } from "./run.js";

const DASHES = [undefined, [6, 4], [2, 3], [10, 4, 2, 4]];

export class ComparePage {
  constructor(app, ids) {
    this.app = app;
    this.ids = ids;
    this.title = `${ids.length} runs`;
    this.element = h("div", {}, h("p.faint", {}, "…"));
    this.ready = this.load();
  }

  async load() {
    const { runs, differing, charts } = await ask("compare", { run: this.ids });
    const label = (id) => runs[id].name;
    const settings = settingsOf(this.ids, differing);
    this.together = settings.length < this.ids.length;
    this.board = new Board(charts, async (chart, first, last) => {
      const found = await Promise.all(this.ids.map((id) => ask("series", { run: id, key: chart.curves.map((curve) => curve.key), points: 600, ...within(first, last) })));
      const curves = (id, index) => chart.curves.map((curve, place) => ({
        ...curveOf({ ...curve, low: null, high: null }, found[this.ids.indexOf(id)]), color: index, dash: DASHES[place % DASHES.length],
        label: chart.curves.length > 1 ? `${label(id)} ${curve.label}` : label(id),
      }));
      if (!this.together) return this.ids.flatMap(curves);
      return settings.flatMap(({ name, ids }, index) => chart.curves.map((curve, place) => ({
        ...meanOf(ids.map((id) => curves(id, index)[place])), label: chart.curves.length > 1 ? `${name} ${curve.label}` : name,
      })));
    });
    this.board.views.forEach((view) => (view.chart.stacked = false));
    const seeds = h("input", { type: "checkbox", checked: this.together, onchange: () => { this.together = seeds.checked; this.board.refresh(); } });
    const toggle = settings.length < this.ids.length ? h("p", {}, h("label", {}, seeds, " seeds of a setting as one curve: their mean, and the range around it")) : "";
    const head = h("tr", {}, h("th", {}), this.ids.map((id, index) => {
      const link = h("a", { href: `#/run/${encodeURIComponent(id)}` }, label(id));
      link.style.color = color(index);
      return h("th", {}, link);
    }));
    const row = (name, say) => h("tr", {}, h("td", {}, name), this.ids.map((id) => h("td", {}, say(id))));
    this.element.replaceChildren(
      h("h1", {}, "Comparison"),
      h("div.scroll", {}, h("table", {}, h("thead", {}, head), h("tbody", {},
        row("state", (id) => runs[id].state), row("step", (id) => number(runs[id].step)),
        row("held-out accuracy", (id) => percent(runs[id].accuracy)), row("reward", (id) => number(runs[id].reward)),
        row("loss", (id) => number(runs[id].loss)),
        Object.entries(differing).map(([key, values]) => row(key, (id) => JSON.stringify(values[id] ?? null)))))),
      toggle, this.board.element);
  }

  async changed(ids) {
    if (ids && !this.ids.some((id) => ids.has(id))) return;
    await this.ready;
    this.board.refresh();
  }

  themed() {
    this.board?.redraw();
  }

  keys = { r: ["the whole runs again", () => this.board.zoom([-Infinity, Infinity])] };

  close() {
    this.board?.close();
  }
}

/** Runs that differ in nothing but their seed, together: [{name, ids}]. */
export function settingsOf(ids, differing) {
  const keys = Object.keys(differing).filter((key) => key !== "seed" && !key.endsWith(".seed") && key !== "model.path");
  const found = new Map();
  for (const id of ids) {
    const name = keys.map((key) => `${key.split(".").at(-1)} ${JSON.stringify(differing[key][id] ?? null)}`).join(", ") || "all";
    found.set(name, [...(found.get(name) ?? []), id]);
  }
  return [...found].map(([name, those]) => ({ name, ids: those }));
}

/** The mean of several curves at each step that any of them has, and their range. */
export function meanOf(curves) {
  const [steps, parts] = joined(curves);
  const at = (index) => parts.map((part) => part.mean[index]).filter((value) => value !== null);
  const over = (reduce) => steps.map((step, index) => reduce(at(index)));
  return {
    ...curves[0], steps, mean: over((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: over((values) => Math.min(...values)), high: over((values) => Math.max(...values)),
  };
}
