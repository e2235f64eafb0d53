// Who was busy when, and what each step waited for.
import { ask } from "../api.js";
import { h } from "../dom.js";
import { kindOf, laneOf, legend, LANE, seconds, told } from "../lanes.js";
import { hint, s } from "../svg.js";
import { tabKeys, tabs } from "../tabs.js";

const PATH = "Critical path";
/** Lanes from what begins a step to what ends it. */
const ORDER = ["Prompts", "Rollout", "Environment", "Reward", "Scorer", "Compute", "Trainer", "checkpoint"];
const SHOWN = [1, 3, 10, 40];

export class TimelinePage {
  constructor(app, id, query = "") {
    this.app = app;
    this.id = id;
    this.title = `${id} › timeline`;
    const asked = new URLSearchParams(query);
    this.last = asked.has("step") ? Number(asked.get("step")) : null; // null: follows the newest
    this.count = asked.has("step") ? 1 : 3;
    this.range = null;
    this.where = h("span.faint", {});
    this.texts = h("ul.steps");
    this.drawn = h("div.lanes");
    this.chosen = h("p.chosen.faint", { role: "status" }, "Drag to zoom in, double click for all of it. A bar says what it is when it is touched.");
    this.element = h("div", {}, tabs(id, "timeline"), this.bar(), this.texts, this.drawn, this.chosen);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.drawn);
    this.keys = {
      ...tabKeys(id), "[": ["earlier steps", () => this.move(-1)], "]": ["later steps", () => this.move(1)],
      l: ["the newest", () => this.follow()], r: ["all that is shown again", () => this.zoom(null)],
    };
    this.ready = this.load();
  }

  bar() {
    const button = (label, title, act) => h("button", { type: "button", title, onclick: act }, label);
    this.step = h("input", { type: "number", min: 1, "aria-label": "last step", onchange: (event) => this.go(Number(event.target.value) || null) });
    const count = h("select", { "aria-label": "steps", onchange: (event) => { this.count = Number(event.target.value); this.again(); } },
      SHOWN.map((number) => h("option", { value: number, selected: number === this.count }, `${number} step${number > 1 ? "s" : ""}`)));
    return h("div.bar", {}, button("‹", "earlier ([)", () => this.move(-1)), count, h("label", {}, "up to", this.step), button("›", "later (])", () => this.move(1)),
      button("newest", "follow the run (l)", () => this.follow()), this.where);
  }

  async load() {
    const last = this.last ?? undefined;
    const found = await ask("timeline", { run: this.id, last, first: last === undefined ? undefined : last - this.count + 1 });
    if (this.last === null && found.bounds && this.count !== 3)
      Object.assign(found, await ask("timeline", { run: this.id, last: found.bounds[1], first: found.bounds[1] - this.count + 1 }));
    this.found = found;
    if (!found.bounds) {
      this.texts.replaceChildren(h("li.faint", {}, "No step has a timeline yet."));
      this.drawn.replaceChildren();
      return;
    }
    this.step.value = found.steps.at(-1)?.step ?? found.bounds[1];
    this.where.textContent = `of ${found.bounds[0]} to ${found.bounds[1]}`;
    this.lay();
    this.draw();
  }

  again() {
    this.range = null;
    return this.load().catch((error) => (this.where.textContent = error.message));
  }

  go(step) {
    this.last = step;
    return this.again();
  }

  follow() {
    return this.go(null);
  }

  move(by) {
    const { bounds, steps } = this.found;
    if (!bounds) return undefined;
    const last = steps.at(-1)?.step ?? bounds[1];
    return this.go(Math.min(bounds[1], Math.max(bounds[0] + this.count - 1, last + by * this.count)));
  }

  /** Spans of all steps by lane, in milliseconds from the first step's start. */
  lay() {
    const { steps, events } = this.found;
    this.origin = steps[0]?.start ?? 0;
    this.lanes = new Map([[PATH, []]]);
    for (const step of steps) {
      const shift = Math.round((step.start - this.origin) * 1000);
      const put = (lane, [name, start, end, details]) => {
        if (!this.lanes.has(lane)) this.lanes.set(lane, []);
        this.lanes.get(lane).push([name, start + shift, end + shift, details]);
      };
      for (const [lane, name, start, end] of step.path) put(PATH, [name, start, end, { "step": step.step, lane }]);
      for (const [lane, spans] of Object.entries(step.lanes)) spans.forEach((span) => put(lane, span));
    }
    for (const spans of this.lanes.values()) spans.sort((one, other) => one[1] - other[1]);
    this.names = [...this.lanes.keys()].sort((one, other) => place(one) - place(other) || one.localeCompare(other, "en", { numeric: true }));
    this.end = steps.length ? Math.round((steps.at(-1).end - this.origin) * 1000) : 1;
    this.marks = events.map((event) => ({ at: Date.parse(event.time) - this.origin * 1000, lane: event.member, text: `${event.kind}${event.member ? ` of ${event.member}` : ""}${event.reason ? `: ${event.reason}` : ""}` }))
      .filter(({ at }) => at >= 0 && at <= this.end);
    this.texts.replaceChildren(...steps.map((step) => h("li", {}, h("button", { type: "button", title: "this step alone", onclick: () => this.zoom([(step.start - this.origin) * 1000, (step.end - this.origin) * 1000]) }, step.text),
      step.missed === null ? h("span.faint", {}, " (the store did not answer: its part is missing)") : "")));
  }

  draw() {
    if (!this.found?.bounds || this.isClosed) return;
    const narrow = this.drawn.clientWidth < 700;
    const width = Math.max(120, this.drawn.clientWidth - (narrow ? 2 : 190));
    const [first, last] = this.range ?? [0, this.end];
    const x = (ms) => ((ms - first) / Math.max(1, last - first)) * width;
    const choose = (span) => (this.chosen.textContent = told(span));
    const lanes = this.names.map((name) => h(`div.row${name === PATH ? ".path" : ""}`, {}, h("b", { title: name }, name),
      laneOf(this.lanes.get(name), x, width, this.marks.filter((mark) => mark.lane === name || (!mark.lane && name === PATH)), choose)));
    const seen = [...new Set([...this.lanes.values()].flat().map(([name]) => kindOf(name)))];
    this.drawn.replaceChildren(h("div.row.axis", {}, h("b", {}, new Date(this.origin * 1000 + first).toISOString().slice(11, 19)), this.axis(x, width, first, last)), ...lanes, legend(seen));
    this.dragging(width, first, last);
  }

  axis(x, width, first, last) {
    const every = niceStep((last - first) / Math.max(2, width / 110));
    const ticks = [];
    for (let at = Math.ceil(first / every) * every; at <= last; at += every) ticks.push(s("text", { x: x(at), y: 12, class: "tick" }, seconds(at)));
    const borders = this.found.steps.map((step) => {
      const at = (step.start - this.origin) * 1000;
      return at >= first && at <= last ? s("text", { x: x(at) + 2, y: LANE - 1, class: "step" }, `step ${step.step}`, hint(step.text)) : null;
    });
    return s("svg", { width, height: LANE, class: "lane" }, ticks, borders);
  }

  /** A drag over the lanes zooms into that time. */
  dragging(width, first, last) {
    const at = (event) => {
      const lane = this.drawn.querySelector("svg.lane").getBoundingClientRect();
      return first + (Math.min(width, Math.max(0, event.clientX - lane.left)) / width) * (last - first);
    };
    this.drawn.onpointerdown = (event) => (this.from = event.button === 0 && event.pointerType === "mouse" ? at(event) : null);
    this.drawn.onpointerup = (event) => {
      const range = this.from === null || this.from === undefined ? null : [this.from, at(event)].sort((one, other) => one - other);
      this.from = null;
      if (range && range[1] - range[0] > (last - first) / 100) this.zoom(range);
    };
    this.drawn.ondblclick = () => this.zoom(null);
  }

  zoom(range) {
    this.range = range;
    this.draw();
  }

  async changed(ids) {
    if (ids && !ids.has(this.id)) return;
    await this.ready;
    if (this.last === null && !this.range) await this.load();
  }

  themed() {
    this.draw();
  }

  close() {
    this.isClosed = true;
    this.sizes.disconnect();
  }
}

function place(name) {
  if (name === PATH) return -1;
  const found = ORDER.findIndex((first) => name.startsWith(first));
  return found < 0 ? ORDER.length : found;
}

/** 1, 2 or 5 times a power of ten. */
function niceStep(ms) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, ms)));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= ms) ?? 10 * power;
}
