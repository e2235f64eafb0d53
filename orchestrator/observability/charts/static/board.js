// Charts by theme: each loads when it comes into view, all share zoom, cursor and smoothing.
import { ChartView } from "./chart.js";
import { h } from "./dom.js";

/** Themes that are closed at first: one asks for them when something is wrong. */
const QUIET = new Set(["store", "weights", "faults", "others"]);

export class Board {
  /** `charts`: as the server describes them. `load`: see ChartView. */
  constructor(charts, load, marks = []) {
    this.views = charts.map((chart) => new ChartView(chart, load, marks));
    this.seen = new Set();
    this.range = [-Infinity, Infinity];
    this.eye = new IntersectionObserver((entries) => entries.forEach((entry) => this.look(entry)), { rootMargin: "200px" });
    this.views.forEach((view) => this.eye.observe(view.element));
    const themes = [...new Set(charts.map((chart) => chart.theme))];
    this.smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", oninput: () => this.smooth() });
    this.whole = h("button", { type: "button", disabled: true, title: "double click on a chart", onclick: () => this.zoom([-Infinity, Infinity]) }, "Whole run");
    this.element = h("div", {},
      h("nav.themes", { "aria-label": "themes" }, themes.map((theme) => h("a", { href: "#", onclick: (event) => this.go(event, theme) }, theme))),
      h("div.bar", {}, h("label", {}, "smoothing", this.smoothing), this.whole, h("span.faint.less", {}, "Drag over a chart to zoom in.")),
      themes.map((theme) => h("details", { "data-theme": theme, open: !QUIET.has(theme) }, h("summary", {}, h("h2", {}, theme[0].toUpperCase() + theme.slice(1))),
        h("div.charts", {}, this.views.filter((view) => view.chart.theme === theme).map((view) => view.element)))));
    this.element.addEventListener("zoom", (event) => this.zoom(event.detail));
    this.sizes = new ResizeObserver(() => this.each((view) => view.resize()));
    this.sizes.observe(this.element);
  }

  each(act) {
    this.views.forEach(act);
  }

  /** What has happened since. Seen when charts are drawn again. */
  mark(marks) {
    this.each((view) => (view.marks = marks));
  }

  look(entry) {
    const view = entry.target.chart;
    if (!entry.isIntersecting) this.seen.delete(view);
    else if (!this.seen.has(view)) {
      this.seen.add(view);
      if (!view.curves || view.isOld) this.load(view);
    }
  }

  load(view) {
    view.isOld = false;
    view.refresh().catch((error) => (view.plotted.textContent = error.message));
  }

  /** New numbers: now for what is in view, later for the rest. */
  refresh() {
    this.each((view) => (this.seen.has(view) ? this.load(view) : (view.isOld = true)));
  }

  zoom(range) {
    this.range = range;
    this.each((view) => (view.range = range));
    this.whole.disabled = range[0] === -Infinity;
    this.refresh();
  }

  smooth() {
    this.each((view) => view.smooth(Number(this.smoothing.value)));
  }

  /** Zoom, smoothing, hidden curves and closed themes of the board in whose place it comes. */
  follow(old) {
    this.smoothing.value = old.smoothing.value;
    this.smooth();
    this.zoom(old.range);
    const before = new Map(old.views.map((view) => [view.chart.name, view.hidden]));
    this.each((view) => (view.hidden = before.get(view.chart.name) ?? view.hidden));
    for (const theme of this.element.querySelectorAll("details"))
      theme.open = old.element.querySelector(`[data-theme="${theme.dataset.theme}"]`)?.open ?? theme.open;
  }

  redraw() {
    this.each((view) => view.curves && view.draw());
  }

  go(event, theme) {
    event.preventDefault();
    const section = this.element.querySelector(`[data-theme="${theme}"]`);
    section.open = true;
    section.scrollIntoView({ behavior: "smooth" });
  }

  close() {
    this.eye.disconnect();
    this.sizes.disconnect();
    this.each((view) => view.destroy());
  }
}
