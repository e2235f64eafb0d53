// The charts of report.html: those of the live page, with numbers that the file itself holds.
import { Board } from "./board.js";

const held = JSON.parse(document.getElementById("numbers").textContent);

/** Points between two steps. */
function between(curve, first, last) {
  const kept = curve.steps.map((step) => step >= first && step <= last);
  const of = (values) => values && values.filter((value, index) => kept[index]);
  return { ...curve, steps: of(curve.steps), mean: of(curve.mean), low: of(curve.low), high: of(curve.high) };
}

const board = new Board(held.charts, async (chart, first, last) => held.curves[chart.name].map((curve) => between(curve, first, last)), held.marks);
document.getElementById("charts").replaceChildren(board.element);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => board.redraw());
