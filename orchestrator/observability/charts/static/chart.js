// One chart: curves of one run or of several, with zoom, smoothing, bands, marks and a legend that follows the cursor.
/* global uPlot */
import { colorOf, faded, shown } from "./colors.js";
import { h, number, percent } from "./dom.js";

const HEIGHT = () => (innerWidth < 640 ? 190 : 230);
const NEAR = 4; // pixels
const MOST_TOLD = 4;
const cursor = uPlot.sync("steps");

/** Exponential moving average of what is finite, started at the first value and corrected for that. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [total, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

/** Several curves with steps of their own, on the union of their steps; null where a curve has no value. */
export function joined(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const spread = (curve, values) => {
    const found = new Array(steps.length).fill(null);
    curve.steps.forEach((step, index) => (found[place.get(step)] = values[index]));
    return found;
  };
  return [steps, curves.map((curve) => ({
    ...curve, mean: spread(curve, curve.mean),
    low: curve.low ? spread(curve, curve.low) : null, high: curve.high ? spread(curve, curve.high) : null,
  }))];
}

export function stacked(curves) {
  let below = null;
  return curves.map((curve) => {
    const own = curve.mean.map((value, index) => (value ?? 0) + (below ? below[index] : 0));
    below = own;
    return { ...curve, mean: own, values: curve.mean };
  });
}

/** Points between two steps. */
export function between(curve, first, last) {
  const kept = curve.steps.map((step) => step >= first && step <= last);
  const of = (values) => values && values.filter((value, index) => kept[index]);
  return { ...curve, steps: of(curve.steps), mean: of(curve.mean), low: of(curve.low), high: of(curve.high) };
}

export class ChartView {
  /** `chart`: as the server describes it. `load(chart, first, last)` resolves to curves: {label, steps, mean, low, high}.
   *  `marks`: [{step, until, text, level}] of what happened. */
  constructor(chart, load, marks = []) {
    this.chart = chart;
    this.load = load;
    this.marks = marks;
    this.hidden = new Set();
    this.range = [-Infinity, Infinity];
    this.weight = 0;
    this.plotted = h("div.plot");
    this.legend = h("div.legend");
    this.element = h("section.chart", { id: `chart-${chart.name}`, "aria-label": chart.title },
      h("h3", {}, chart.title, h("span.faint", {}, chart.unit)),
      chart.about ? h("p", {}, chart.about) : null, this.plotted, this.legend);
    this.element.chart = this;
  }

  async refresh() {
    const asked = (this.asked = Symbol());
    const curves = await this.load(this.chart, ...this.range);
    if (asked !== this.asked) return; // an older answer
    const known = this.chart.known && between(this.chart.known, ...this.range);
    this.curves = known ? [...curves, { ...known, dash: [4, 4], behind: true }] : curves;
    this.draw();
  }

  smooth(weight) {
    this.weight = weight;
    if (this.curves) this.draw();
  }

  zoom(first, last) {
    this.range = [first, last];
    return this.refresh();
  }

  draw() {
    const { chart } = this;
    const visible = this.curves.filter((curve) => curve.steps.length);
    let [steps, curves] = joined(visible);
    if (chart.stacked) curves = stacked(curves);
    this.destroy();
    this.plotted.textContent = steps.length ? "" : "nothing yet";
    if (!steps.length) return;
    const ink = { text: shown("--faint"), line: shown("--line"), bad: shown("--bad"), warn: shown("--warn"), good: shown("--good"), note: shown("--faint") };
    const [data, series, bands, places] = [[steps], [{}], [], []];
    curves.forEach((curve, index) => {
      const stroke = colorOf(curve, index);
      const show = !this.hidden.has(curve.label);
      const dots = chart.dots || curve.steps.length === 1;
      const smooth = !chart.stacked && !chart.dots && this.weight > 0;
      if (curve.low && !chart.stacked) {
        data.push(curve.high, curve.low);
        bands.push({ series: [series.length, series.length + 1], fill: faded(stroke, 0.15) });
        for (const side of ["high", "low"]) series.push({ label: `${curve.label} ${side}`, stroke: "transparent", width: 0, points: { show: false }, show, spanGaps: true });
      }
      if (smooth) {
        data.push(curve.mean);
        series.push({ label: `${curve.label} raw`, stroke: faded(stroke, 0.3), width: 1, points: { show: false }, show, spanGaps: true });
      }
      if (chart.stacked && index) bands.push({ series: [series.length, places[index - 1]], fill: faded(stroke, 0.6) });
      places.push(series.length);
      data.push(smooth ? smoothed(curve.mean, this.weight) : curve.mean);
      series.push({
        label: curve.label, stroke, width: 1.6, show, spanGaps: true, dash: curve.dash,
        fill: chart.stacked && !index ? faded(stroke, 0.6) : undefined,
        points: { show: dots, size: 6, fill: stroke },
      });
    });
    this.shownCurves = curves;
    const positive = data.slice(1).every((values) => values.every((value) => value === null || value > 0));
    const said = (value) => (chart.percent ? percent(value) : number(value));
    const axis = { stroke: ink.text, grid: { stroke: ink.line, width: 1 }, ticks: { stroke: ink.line, width: 1 }, font: "12px system-ui" };
    this.plot = new uPlot({
      width: this.plotted.clientWidth || 400, height: HEIGHT(), legend: { show: false },
      scales: { x: { time: false }, y: { distr: chart.log && positive ? 3 : 1, range: chart.log && positive ? undefined : (plot, low, high) => this.limits(low, high) } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 62, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : said(tick))) }],
      series, bands,
      cursor: { sync: { key: cursor.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => this.overlay(plot, ink)],
      },
    }, data, this.plotted);
    this.plot.over.addEventListener("dblclick", () => this.element.dispatchEvent(new CustomEvent("zoom", { bubbles: true, detail: [-Infinity, Infinity] })));
    this.tell(null);
  }

  limits(low, high) {
    const { bottom, top, bound } = this.chart;
    if (low === null || high === null) return [0, 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [bottom ?? low - margin, top ?? Math.max(high, bound ?? -Infinity) + margin];
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    const range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.element.dispatchEvent(new CustomEvent("zoom", { bubbles: true, detail: range }));
  }

  overlay(plot, ink) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const scale = devicePixelRatio;
    for (const mark of this.marks) {
      const left = plot.valToPos(mark.step, "x", true);
      const right = plot.valToPos(mark.until ?? mark.step, "x", true);
      const isNote = mark.level === "note"; // a tick at the bottom
      const height = isNote ? 8 * scale : bbox.height;
      ctx.globalAlpha = right > left ? 0.25 : 0.6;
      ctx.fillStyle = ink[mark.level];
      ctx.fillRect(left, bbox.top + bbox.height - height, Math.max(1.5 * scale, right - left), height);
    }
    ctx.globalAlpha = 1;
    if (this.chart.bound !== null) {
      const y = plot.valToPos(this.chart.bound, "y", true);
      ctx.strokeStyle = ink.bad;
      ctx.lineWidth = scale;
      ctx.setLineDash([5 * scale, 4 * scale]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** The legend, with values at a place, or the newest ones. */
  tell(index) {
    const at = (curve) => {
      const values = curve.values ?? curve.mean;
      if (index !== null && index !== undefined) return values[index];
      return values.findLast((value) => value !== null);
    };
    const step = index === null || index === undefined ? null : this.plot.data[0][index];
    const marks = step === null ? [] : this.marksAt(this.plot.cursor.left, step);
    this.legend.replaceChildren(
      ...(step === null ? [] : [h("span.faint", {}, `step ${number(step)}`)]),
      ...this.shownCurves.map((curve, place) => h(`button${this.hidden.has(curve.label) ? ".hidden" : ""}`, {
        type: "button", title: "show or hide", onclick: () => this.toggle(curve.label),
      }, swatch(colorOf(curve, place)), `${curve.label} `, h("b", {}, this.chart.percent ? percent(at(curve)) : number(at(curve))))),
      ...marks.map(({ text, level }) => h(`span.mark.${level}`, {}, text)));
  }

  /** Marks that the cursor is on, or near enough to be meant. */
  marksAt(left, step) {
    const place = (at) => this.plot.valToPos(at, "x");
    const isMeant = (mark) => Math.abs(mark.step - step) < 0.5
      || (left >= place(mark.step) - NEAR && left <= place(mark.until ?? mark.step) + NEAR);
    return this.marks.filter(isMeant).slice(0, MOST_TOLD);
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.draw();
  }

  resize() {
    if (this.plot) this.plot.setSize({ width: this.plotted.clientWidth, height: HEIGHT() });
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}

function swatch(stroke) {
  const line = h("i");
  line.style.background = stroke;
  return line;
}
