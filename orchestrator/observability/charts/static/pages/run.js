// One run: how it stands, its charts by theme, what happened, what it was told.
import { ask } from "../api.js";
import { Board } from "../board.js";
import { h, time } from "../dom.js";
import { tabKeys, tabs } from "../tabs.js";

export class RunPage {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.title = id;
    this.element = h("div", {}, h("p.faint", {}, "…"));
    this.ready = this.load();
  }

  async load() {
    const run = await ask("run", { run: this.id });
    this.run = run;
    this.top = h("div", {});
    this.events = h("div", {});
    this.makeBoard();
    const { description, config, changed } = run;
    this.element.replaceChildren(this.top, description ? h("p.faint", {}, description) : "", this.board.element, this.events,
      h("h2", {}, "Configuration"), h("pre", {}, text(changed)),
      h("details", {}, h("summary", {}, "all of it"), h("pre", {}, text(config))));
    this.tell();
  }

  makeBoard() {
    this.board = new Board(this.run.charts, async (chart, first, last) => {
      const points = Math.max(200, Math.min(1500, 2 * (this.element.clientWidth || 600)));
      const keys = [...new Set(chart.curves.flatMap((curve) => [curve.key, curve.low, curve.high]).filter(Boolean))];
      const found = await ask("series", { run: this.id, key: keys, points, ...within(first, last) });
      return chart.curves.map((curve) => curveOf(curve, found));
    }, this.run.marks);
  }

  /** The head and the table of events, from what is known. */
  tell() {
    const line = this.app.lines.get(this.id) ?? this.run.line;
    const card = ({ label, value, detail, good }) => h(`div.card${{ true: ".good", false: ".bad" }[good] ?? ""}`, { title: detail }, h("b", {}, value), h("span", {}, label), detail ? h("small", {}, detail) : null);
    this.top.replaceChildren(
      tabs(this.id, "run"), h("h1", {}, line.name), h("p.faint", {}, h(`span.state.${line.state}`, {}, line.state), ` ${[line.run_id && `id ${line.run_id}`, line.recipe, line.algorithm, time(line.started)].filter(Boolean).join(" · ")}`),
      line.error ? h("div.notice", {}, line.error) : "",
      ...adviceOf(this.run.events),
      h("div.cards", {},
        card({ label: "Step", value: `${line.step ?? "–"} of ${line.max_steps ?? "?"}` }), this.run.cards.filter(({ label }) => label !== "Policy updates").map(card)));
    const events = this.run.events.toReversed();
    this.events.replaceChildren(h("h2", {}, "Events"), h("div.scroll", {}, h("table.events", {}, h("tbody", {}, events.map((event) => {
      const { time: when, kind, ...facts } = event;
      return h("tr", {}, h("td", {}, String(when ?? "").slice(11, 19)), h("td", {}, String(kind)), h("td.wide", {}, said(facts)));
    })))));
  }

  /** The run has changed: new numbers, and what there is new to show. */
  async changed(ids) {
    if (ids && !ids.has(this.id)) return;
    await this.ready;
    const before = names(this.run.charts);
    this.run = await ask("run", { run: this.id });
    this.tell();
    this.board.mark(this.run.marks);
    if (names(this.run.charts) !== before) {
      const old = this.board;
      this.makeBoard();
      this.board.follow(old);
      old.element.replaceWith(this.board.element);
      old.close();
    } else this.board.refresh();
  }

  themed() {
    this.board?.redraw();
  }

  get keys() {
    return {
      r: ["the whole run again", () => this.board.zoom([-Infinity, Infinity])],
      ...tabKeys(this.id),
    };
  }

  close() {
    this.board?.close();
  }
}

export const within = (first, last) => ({ first: first === -Infinity ? null : first, last: last === Infinity ? null : last });

const names = (charts) => charts.map((chart) => chart.name).join();

/** What the server has found of a curve: a band is the metrics around it, or the range of the steps that share a point. */
export function curveOf(curve, found) {
  const own = found[curve.key];
  const low = curve.low ? (found[curve.low].low ?? found[curve.low].mean) : own.low;
  const high = curve.high ? (found[curve.high].high ?? found[curve.high].mean) : own.high;
  const fits = (values) => (values && values.length === own.steps.length ? values : null);
  return { label: curve.label, steps: own.steps, mean: own.mean, low: fits(low), high: fits(high) };
}

/** What the run says is wrong with it: the newest of each rule. */
function adviceOf(events) {
  const newest = new Map(events.filter((event) => event.kind === "warning" || event.kind === "hint").map((event) => [event.rule, event]));
  return [...newest.values()].map((event) => h(`div.notice.${event.kind}`, {}, h("b", {}, `step ${event.step}: `), `${event.text}. ${event.advice}`));
}

const said = (facts) => Object.entries(facts).filter(([, value]) => value !== null)
  .map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ").slice(0, 600);

/** Nested values as indented lines. */
export function text(value, indent = "") {
  return Object.entries(value).map(([key, inner]) =>
    inner !== null && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length
      ? `${indent}${key}:\n${text(inner, `${indent}  `)}` : `${indent}${key}: ${typeof inner === "string" ? inner : JSON.stringify(inner)}\n`).join("");
}
