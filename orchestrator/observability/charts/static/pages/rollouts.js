// What the policy wrote: samples by what they are, one of them with its tokens, its group beside it.
import { ask } from "../api.js";
import { h, number } from "../dom.js";
import { marked, parted } from "../pictures.js";
import { credits, shadeOf, SHADES } from "../shades.js";
import { tabKeys, tabs } from "../tabs.js";

const PAGE = 50;
/** Tokens and characters that are shown of one sample, for a browser to stay quick. */
const MOST_TOKENS = 8192;
const MOST_CHARACTERS = 100_000;
/** Between two looks while files are being read. */
const LATER_MS = 400;
/** Columns with one value a sample that have a place of their own. All others are the dataflow's own. */
const KNOWN = new Set(["row_id", "group_id", "task", "response_text", "transcript", "finish_reason", "reward", "advantage"]);
const SORTS = { step: "newest", reward: "reward", advantage: "advantage", tokens: "length", group: "group" };

export class RolloutsPage {
  constructor(app, id, query = "") {
    this.app = app;
    this.id = id;
    this.title = `${id} › rollouts`;
    this.wanted = { sort: "step", down: "1", offset: 0, limit: PAGE, ...Object.fromEntries(new URLSearchParams(query)) };
    this.at = 0;
    this.shade = "logprob";
    this.form = this.makeForm();
    this.count = h("p.faint");
    this.list = h("div.samples");
    this.shown = h("div.sample");
    this.element = h("div", {},
      tabs(id, "rollouts"), this.form, this.count,
      h("div.split", {}, this.list, this.shown));
    this.ready = this.load();
  }

  makeForm() {
    const field = (name, label, type = "number", more = {}) => h("label", {}, label, h("input", {
      name, type, value: this.wanted[name] ?? "", step: "any", size: 8, ...more, onchange: (event) => this.set(name, event.target.value),
    }));
    this.reasons = h("select", { name: "finish_reason", "aria-label": "finish reason", onchange: (event) => this.set("finish_reason", event.target.value) }, h("option", { value: "" }, "any end"));
    this.search = h("input", { type: "search", name: "text", placeholder: "text in prompt or response", "aria-label": "text", value: this.wanted.text ?? "", onchange: (event) => this.set("text", event.target.value) });
    const sort = h("select", { "aria-label": "sort", onchange: (event) => this.set("sort", event.target.value) },
      Object.entries(SORTS).map(([key, label]) => h("option", { value: key, selected: key === this.wanted.sort }, label)));
    const down = h("button", { type: "button", title: "largest or smallest first", onclick: (event) => {
      this.set("down", this.wanted.down === "0" ? "1" : "0");
      event.target.textContent = this.wanted.down === "0" ? "↑" : "↓";
    } }, this.wanted.down === "0" ? "↑" : "↓");
    return h("form.bar", { onsubmit: (event) => event.preventDefault() }, this.search,
      h("span.pair", {}, field("first_step", "steps"), field("last_step", "to")), field("group", "group"),
      h("span.pair", {}, field("least_reward", "reward"), field("most_reward", "to")), this.reasons, h("label", {}, "by", sort), down);
  }

  set(name, value) {
    this.wanted[name] = value;
    if (name !== "offset") this.wanted.offset = 0;
    [this.at, this.chosen] = [0, null];
    return this.again();
  }

  /** What cannot be answered is told above the list. */
  again() {
    return this.load().catch((error) => (this.count.textContent = error.message));
  }

  async load() {
    const asked = (this.asked = Symbol());
    clearTimeout(this.later);
    const found = await ask("samples", { run: this.id, ...clean(this.wanted) });
    if (asked !== this.asked || this.isClosed) return;
    this.found = found;
    const known = found.known < found.files ? ` ${found.known} of ${found.files} files are read so far.` : "";
    const late = found.complete ? "" : " There was not time enough to look for the text in all of them.";
    const broken = found.unreadable ? ` ${found.unreadable} file(s) cannot be read.` : "";
    this.count.textContent = found.files ? `${found.total.toLocaleString("en-US")} samples.${known}${late}${broken}` : "No samples were written yet (tracking.samples_every_steps).";
    for (const reason of found.reasons)
      if (![...this.reasons.options].some((option) => option.value === reason)) this.reasons.append(h("option", { value: reason }, reason));
    this.reasons.value = this.wanted.finish_reason ?? "";
    if (this.chosen) this.at = Math.max(0, found.rows.findIndex((row) => isSame(row, this.chosen)));
    this.at = Math.min(this.at, Math.max(0, found.rows.length - 1));
    this.draw();
    if (found.known < found.files) this.later = setTimeout(() => this.again(), LATER_MS);
    if (!found.rows.length) {
      this.line = null;
      this.shown.replaceChildren();
    } else if (!isSame(this.line, this.chosen ?? found.rows[this.at])) await this.open(this.at);
  }

  draw() {
    const { rows, total } = this.found;
    const offset = Number(this.wanted.offset);
    const turn = (by, label) => h("button", { type: "button", disabled: offset + by < 0 || offset + by >= total, onclick: () => this.set("offset", Math.max(0, offset + by)) }, label);
    this.list.replaceChildren(
      ...rows.map((row, index) => h(`button.line${index === this.at ? ".at" : ""}`, { type: "button", "data-step": row.step, "data-place": row.place, "aria-current": index === this.at, onclick: () => this.choose(index) },
        h("span.head", {}, h("b", {}, reward(row.reward)), h("span.faint", {}, `${row.policy ? `${row.policy} · ` : ""}step ${row.step} · group ${row.group} · ${row.tokens} tokens${row.finish_reason ? ` · ${row.finish_reason}` : ""}`)),
        h("span.excerpt", {}, excerpt(row)))),
      h("div.bar", {}, turn(-PAGE, "earlier"), turn(PAGE, "more"), h("span.faint", {}, total ? `${offset + 1} to ${offset + rows.length}` : "")));
  }

  /** By a person: it stays open while others are written. */
  choose(index) {
    this.chosen = this.found.rows[index];
    return this.open(index).catch((error) => (this.count.textContent = error.message));
  }

  async open(index) {
    this.at = index;
    const lines = this.list.querySelectorAll(".line");
    lines.forEach((button, place) => {
      button.classList.toggle("at", place === index);
      button.setAttribute("aria-current", place === index);
    });
    scrolledTo(lines[index], this.list);
    const line = (this.line = this.found.rows[index]);
    const asked = (this.opened = Symbol());
    const [sample, group] = await Promise.all([
      ask("sample", { run: this.id, step: line.step, place: line.place }),
      ask("samples", { run: this.id, group: line.group, first_step: line.step, last_step: line.step, sort: "reward", limit: 64 }),
    ]);
    if (asked !== this.opened || this.isClosed) return;
    this.sample = sample;
    this.group = group.rows;
    this.tell(line);
  }

  tell(line) {
    const { sample } = this;
    const task = parsed(sample.task) ?? {};
    const messages = parsed(sample.transcript);
    const said = Array.isArray(messages) ? messages.filter(Boolean) : null;
    const pictures = Array.isArray(sample.pictures) ? sample.pictures : [];
    const shades = h("select", { "aria-label": "colour of tokens", onchange: (event) => { this.shade = event.target.value; this.tell(line); } },
      Object.entries(SHADES).map(([key, { title }]) => h("option", { value: key, selected: key === this.shade }, title)));
    this.shown.replaceChildren(
      h("h2", {}, `step ${line.step}, group ${line.group}`),
      h("p.faint", {}, [`reward ${number(sample.reward)}`, sample.advantage === undefined ? "" : `advantage ${number(mean(sample.advantage))}`, `${line.tokens} tokens`, sample.finish_reason].filter(Boolean).join(" · ")),
      ...ownValues(sample),
      ...(task.prompt ? [h("h3", {}, "Prompt"), h("pre.text", {}, marked(String(task.prompt), said ? [] : pictures, this.id, clipped))] : []),
      ...(said ? [h("h3", {}, "Conversation"), conversation(said, sample, pictures, this.id)] : []),
      h("h3", {}, "Tokens ", h("label.faint", {}, shades)), this.tokens(), h("p.faint.scale", {}, SHADES[this.shade].about),
      ...(task.answer === undefined || task.answer === null ? [] : [h("h3", {}, "Answer"), h("pre.text", {}, clipped(task.answer))]),
      h("h3", {}, `The group: ${this.group.length} attempts`),
      this.attempts(line));
  }

  /** The whole group as a table. */
  attempts(line) {
    const head = ["reward", "advantage", "tokens"].map((name) => h("th.number", {}, name));
    const row = (one) => h(`tr${one.place === line.place ? ".at" : ""}`, {},
      h("td.number", {}, number(one.reward)), h("td.number", {}, number(one.advantage)), h("td.number", {}, String(one.tokens)),
      h("td", {}, one.finish_reason ?? ""), h("td.wide", {}, [one.policy, one.response_text].filter(Boolean).join(": ")));
    return h("div.scroll", {}, h("table.group", {}, h("thead", {}, h("tr", {}, head, h("th", {}, "end"), h("th", {}, "response"))), h("tbody", {}, this.group.map(row))));
  }

  tokens() {
    const { sample } = this;
    const ends = new Map();
    let end = 0;
    const told = earned(sample);
    (sample.turn_tokens ?? []).forEach((count, place) => ends.set((end += count), told[place]));
    const few = sample.token_texts.slice(0, MOST_TOKENS);
    const left = sample.token_texts.length - few.length;
    return h("pre.tokens", {}, few.flatMap((text, index) => {
      const { shade, tip } = shadeOf(this.shade, sample, index);
      const token = h("span", { title: `${JSON.stringify(text)} ${tip}` }, text === "" ? "␣" : text);
      if (shade) token.style.background = shade;
      return ends.has(index) && index ? [h("span.turn", { title: "next turn" }, `¶ ${ends.get(index)}\n`), token] : [token];
    }), ends.has(few.length) ? h("span.turn", {}, ` ${ends.get(few.length)}`) : null, left ? h("span.turn", {}, ` … and ${number(left)} more tokens`) : null);
  }

  async changed(ids) {
    if (ids && !ids.has(this.id)) return;
    if (Number(this.wanted.offset) === 0) await this.load();
  }

  get keys() {
    return {
      ...tabKeys(this.id),
      n: ["next sample", () => this.move(1)],
      p: ["sample before", () => this.move(-1)],
      "/": ["look for a text", () => this.search.focus()],
    };
  }

  async move(by) {
    const next = this.at + by;
    const offset = Number(this.wanted.offset);
    if (next >= 0 && next < this.found.rows.length) return this.choose(next);
    if (next < 0 && offset > 0) {
      this.wanted.offset = Math.max(0, offset - PAGE);
      [this.at, this.chosen] = [PAGE - 1, null];
      return this.again();
    }
    if (next > 0 && offset + PAGE < this.found.total) return this.set("offset", offset + PAGE);
    return undefined;
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.later);
  }
}

const isSame = (one, other) => Boolean(one && other && one.step === other.step && one.place === other.place);

/** Within its own box alone: the page does not move. */
function scrolledTo(element, box) {
  const [inner, outer] = [element.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
}

function clipped(text) {
  const all = String(text);
  return all.length > MOST_CHARACTERS ? `${all.slice(0, MOST_CHARACTERS)} … and ${number(all.length - MOST_CHARACTERS)} more characters` : all;
}

const clean = (wanted) => Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== "" && value !== null));

const reward = (value) => (value === null ? "–" : number(value));

const mean = (value) => (Array.isArray(value) ? value.reduce((sum, one) => sum + one, 0) / Math.max(1, value.length) : value);

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function excerpt(row) {
  const said = row.response_text || row.transcript || "";
  return said.replace(/\s+/g, " ").slice(0, 120) || "(nothing)";
}

/** The credit of each turn, and its own reward if some turn has one, as texts in the order of the tokens. */
function earned(sample) {
  const rewards = (sample.turn_rewards ?? []).some(Boolean) ? sample.turn_rewards : [];
  return credits(sample).map((credit, place) =>
    [credit === null ? "" : `credit ${number(credit)}`, place in rewards ? `reward ${number(rewards[place])}` : ""].filter(Boolean).join(" · "));
}

/** Who said what, tools and their answers included, and under each turn of the policy what it has earned. */
function conversation(messages, sample, pictures, run) {
  const told = earned(sample);
  const ofTurn = (message) => told[(sample.turn_ids ?? []).indexOf(message.turn)];
  const shown = (content) => (Array.isArray(content) ? parted(content, pictures, run, clipped) : clipped(typeof content === "string" ? content : JSON.stringify(content)));
  return h("div.talk", {}, messages.map((message) => h(`div.said.${/^\w+$/.test(message.role) ? message.role : "other"}`, {},
    h("b", {}, message.role), message.reasoning_content ? h("pre.text.faint", {}, clipped(message.reasoning_content)) : null,
    message.content ? h("pre.text", {}, shown(message.content)) : null,
    (message.tool_calls ?? []).map((call) => h("pre.text.call", {}, clipped(`${call.function?.name}(${JSON.stringify(call.function?.arguments)})`))),
    ofTurn(message) ? h("p.faint.credit", {}, ofTurn(message)) : null)));
}

/** A line with what the dataflow's own columns have of a sample. */
function ownValues(sample) {
  const own = Object.entries(sample).filter(([name, value]) => !KNOWN.has(name) && ["number", "string"].includes(typeof value));
  const told = own.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : clipped(value)}`);
  return told.length ? [h("p.faint", {}, told.join(" · "))] : [];
}
