// Several runs in the same charts, and in what they were told differently.
import { ask } from "../api.js";
import { Board } from "../board.js";
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
    this.board = new Board(charts, async (chart, first, last) => {
      const found = await Promise.all(this.ids.map((id) => ask("series", { run: id, key: chart.curves.map((curve) => curve.key), points: 600, ...within(first, last) })));
      return this.ids.flatMap((id, index) => chart.curves.map((curve, place) => ({
        ...curveOf({ ...curve, low: null, high: null }, found[index]), color: index, dash: DASHES[place % DASHES.length],
        label: chart.curves.length > 1 ? `${label(id)} ${curve.label}` : label(id),
      })));
    });
    this.board.views.forEach((view) => (view.chart.stacked = false));
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
        Object.entries(differing).map(([key, values]) => row(key, (id) => JSON.stringify(values[id] ?? null)))))),
      this.board.element);
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
