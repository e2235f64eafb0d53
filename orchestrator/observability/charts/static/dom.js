// Elements without markup: whatever a model or a user wrote is text, and never read as HTML.

/** h("a.link", {href: "#/"}, "text", child, …): attributes that are false or null are left out; on… are listeners. */
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const number = (value, digits = 4) =>
  value === null || value === undefined || Number.isNaN(value) ? "–"
    : Number.isInteger(value) ? value.toLocaleString("en-US")
    : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2)
    : String(Number(value.toPrecision(digits)));

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);

export function elapsed(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [d, hours, m, s] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return d ? `${d} d ${hours} h` : hours ? `${hours} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

export const time = (iso) => (iso ? iso.slice(0, 16).replace("T", " ") : "–");
