// Who waits for whom: boxes by role, from the prompts to the trainer, and an arrow from each that waits.
import { hint, s } from "./svg.js";

const BOX = { width: 168, height: 34, across: 74, down: 12 };
/** Above and below the boxes, for arrows that pass some. */
const ROOM = 26;
const ROLES = [["prompts"], ["rollout", "environment"], ["reward", "scorer", "compute"], ["trainer"]];
/** Of a role; more are one box. */
const MOST = 10;

/** `members`: {name, role, phase}. `waits`: {who, on, what}. */
export function waitGraph(members, waits) {
  const { boxes, boxOf } = placed(members);
  const waiting = new Set(waits.map((wait) => boxOf.get(wait.who)));
  const height = Math.max(...boxes.map((box) => box.y)) + BOX.height + BOX.down + ROOM;
  const width = ROLES.length * (BOX.width + BOX.across);
  const arrows = new Map();
  for (const { who, on, what } of waits) {
    const [from, to] = [boxOf.get(who), boxOf.get(on)];
    if (from && to && from !== to) arrows.set(`${from.name}>${to.name}`, { from, to, what: [...(arrows.get(`${from.name}>${to.name}`)?.what ?? []), `${who} waits for ${on}: ${what}`] });
  }
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, class: "graph", role: "img", "aria-label": waits.map(({ who, on, what }) => `${who} waits for ${on}: ${what}`).join("; ") || "nobody waits" },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, s("path", { d: "M0 0 L8 4 L0 8 z", class: "arrowhead" }))),
    [...arrows.values()].map((one) => arrow(one, height)),
    boxes.map((box) => s("g", { class: `box${waiting.has(box) ? " waits" : ""}` }, hint(box.about),
      s("rect", { x: box.x, y: box.y, width: BOX.width, height: BOX.height, rx: 6 }),
      s("text", { x: box.x + 8, y: box.y + 14 }, short(box.name)), s("text", { x: box.x + 8, y: box.y + 27, class: "small" }, short(box.about, 28)))));
}

function placed(members) {
  const boxes = [];
  const boxOf = new Map();
  ROLES.forEach((roles, column) => {
    const own = members.filter((member) => roles.includes(member.role));
    const x = column * (BOX.width + BOX.across) + 4;
    let y = BOX.down + ROOM;
    for (const role of roles) {
      const same = own.filter((member) => member.role === role);
      for (const few of same.length > MOST ? [same] : same.map((member) => [member])) {
        const name = few.length > 1 ? `${role} × ${few.length}` : few[0].name;
        const box = { name, x, y, about: few.length > 1 ? phases(few) : few[0].phase ?? "does not answer" };
        boxes.push(box);
        few.forEach((member) => boxOf.set(member.name, box));
        y += BOX.height + BOX.down;
      }
    }
  });
  return { boxes, boxOf };
}

function phases(members) {
  const counts = {};
  for (const { phase } of members) counts[phase ?? "no answer"] = (counts[phase ?? "no answer"] ?? 0) + 1;
  return Object.entries(counts).map(([phase, count]) => `${count} ${phase}`).join(", ");
}

/** Between the sides that face each other; one that passes other boxes goes above them, or back below them. */
function arrow({ from, to, what }, height) {
  const middle = BOX.height / 2;
  const [y1, y2] = [from.y + middle, to.y + middle];
  let path;
  const [one, other] = [from.x + BOX.width / 2, to.x + BOX.width / 2];
  if (from.x > to.x + BOX.width + 2 * BOX.across) path = `M${one} ${from.y} C${one} 2 ${one} 4 ${one - 60} 4 L${other + 60} 4 C${other} 4 ${other} 4 ${other} ${to.y - 2}`;
  else if (to.x > from.x + BOX.width + 2 * BOX.across) path = `M${one} ${from.y + BOX.height} C${one} ${height - 4} ${one} ${height - 4} ${one + 60} ${height - 4} L${other - 60} ${height - 4} C${other} ${height - 4} ${other} ${height - 4} ${other} ${to.y + BOX.height + 2}`;
  else if (from.x === to.x) path = `M${from.x + BOX.width} ${y1} C${from.x + BOX.width + 40} ${y1} ${from.x + BOX.width + 40} ${y2} ${to.x + BOX.width + 2} ${y2}`;
  else if (from.x > to.x) path = `M${from.x} ${y1} C${from.x - 50} ${y1} ${to.x + BOX.width + 50} ${y2} ${to.x + BOX.width + 2} ${y2}`;
  else path = `M${from.x + BOX.width} ${y1} C${from.x + BOX.width + 50} ${y1} ${to.x - 50} ${y2} ${to.x - 2} ${y2}`;
  return s("path", { d: path, class: "arrow", "marker-end": "url(#arrow)" }, hint(what.join("\n")));
}

const short = (text, most = 20) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
