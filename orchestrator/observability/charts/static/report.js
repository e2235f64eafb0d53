// The charts of report.html: those of the live page, with numbers that the file itself holds.
import { Board } from "./board.js";
import { between } from "./chart.js";

const held = JSON.parse(document.getElementById("numbers").textContent);

const board = new Board(held.charts, async (chart, first, last) => held.curves[chart.name].map((curve) => between(curve, first, last)), held.marks);
document.getElementById("charts").replaceChildren(board.element);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => board.redraw());
