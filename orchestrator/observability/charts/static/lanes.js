// A lane an actor: what it did from when to when, drawn to a width of so many pixels.
import { color, faded } from "./colors.js";
import { h } from "./dom.js";
import { hint, s } from "./svg.js";

export const LANE = 26;
const GAP = 5;
const KINDS = [["rollout", 0], ["reward", 3], ["update", 1], ["publish", 2], ["load weights", 2], ["evaluate", 7], ["save", 6], ["write", 6]];
const WAIT = /^wait|^between/;

/** Waits are faint, but for those on the critical path that say who was busy meanwhile. */
export function paint(name) {
  const kind = kindOf(name);
  if (WAIT.test(kind)) return null;
  const known = KINDS.find(([start]) => kind.startsWith(start));
  return color(known ? known[1] : 5);
}

export const kindOf = (name) => (name.startsWith("waiting for ") ? "rollout" : WAIT.test(name) ? "waiting" : name.replace(/ by .*/, ""));

/** Spans that overlap share the lane's height: by span its row, and how many there are beside it. */
export function rowsOf(spans) {
  const found = [];
  let ends = [];
  let together = { count: 0 };
  for (const [, start, end] of spans) {
    if (ends.every((before) => before <= start + 1)) [ends, together] = [[], { count: 0 }];
    let row = ends.findIndex((before) => before <= start + 1);
    if (row < 0) row = ends.length;
    ends[row] = end;
    together.count = Math.max(together.count, ends.length);
    found.push({ row, together });
  }
  return found;
}

/** `spans`: [name, start, end, details] in milliseconds, by their start. `x`: milliseconds to pixels. */
export function laneOf(spans, x, width, marks, choose) {
  const rows = rowsOf(spans);
  const height = LANE - GAP;
  const bars = spans.map((span, index) => {
    const [name, start, end] = span;
    const [left, right] = [Math.max(-2, x(start)), Math.min(width + 2, x(end))];
    if (right < 0 || left > width) return null;
    const fill = paint(name);
    const { row, together: { count } } = rows[index];
    return s("rect", {
      x: left, y: GAP / 2 + (row * height) / count, width: Math.max(1, right - left), height: Math.max(1.5, height / count - (count > 1 && count < 8 ? 0.5 : 0)),
      rx: count > 2 ? 0 : 2, fill: fill ?? "currentColor", opacity: fill ? 1 : 0.13, "data-span": name, onclick: () => choose(span),
    }, hint(told(span)));
  });
  const lines = marks.map(({ at, text }) => s("line", { x1: x(at), x2: x(at), y1: 0, y2: LANE, class: "fault" }, hint(text)));
  return s("svg", { width, height: LANE, class: "lane" }, bars, lines);
}

export function told([name, start, end, details = {}]) {
  const more = Object.entries(details).map(([key, value]) => `${key} ${value}`).join(", ");
  return `${name}: ${seconds(end - start)}${more ? ` (${more})` : ""}`;
}

export const seconds = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms)} ms`);

export const legend = (names) => h("p.legend", {}, names.map((name) => {
  const key = h("i", {});
  key.style.background = paint(name) ?? faded("#808080", 0.35);
  return h("span", {}, key, name);
}));
