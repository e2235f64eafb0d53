// Told apart on light and dark ground, also by people who see fewer colours (Okabe and Ito, 2008, darkened or lightened).
const PALETTE = ["#2f7de1", "#e08600", "#0a9f78", "#c65a9d", "#d24b2a", "#4fb0e6", "#8a7d00", "#7a6ce0"];

/** Of what stands behind the curves, on light and dark ground. */
const BEHIND = "#808a97";

export const color = (index) => PALETTE[index % PALETTE.length];
/** Of the curve at that place of a chart. */
export const colorOf = (curve, place) => (curve.behind ? BEHIND : color(curve.color ?? place));
export const faded = (hex, alpha) => `${hex}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;

/** The colour of a CSS variable as the page shows it now: canvases do not know light-dark(). */
export function shown(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
