// What the actors printed, by actor and time; what the run failed with first.
import { ask } from "../api.js";
import { h, number } from "../dom.js";
import { tabKeys, tabs } from "../tabs.js";

const AGAIN_MS = 2000;

export class LogsPage {
  constructor(app, id, query = "") {
    this.app = app;
    this.id = id;
    this.title = `${id} › logs`;
    this.wanted = Object.fromEntries(new URLSearchParams(query));
    this.members = h("select", { "aria-label": "actor", onchange: (event) => this.set("member", event.target.value) }, h("option", { value: "" }, "all actors"));
    this.search = h("input", { type: "search", placeholder: "text", "aria-label": "text", value: this.wanted.text ?? "", oninput: (event) => this.set("text", event.target.value) });
    const trouble = h("input", { type: "checkbox", onchange: (event) => this.set("trouble", event.target.checked ? "1" : "") });
    this.told = h("div", {});
    this.count = h("p.faint", { role: "status" });
    this.lines = h("div.lines", { tabindex: 0 });
    this.element = h("div", {}, tabs(id, "logs"), this.told, h("form.bar", { onsubmit: (event) => event.preventDefault() }, this.members, this.search, h("label", {}, trouble, "errors only")), this.count, this.lines);
    this.keys = { ...tabKeys(id), "/": ["look for a text", () => this.search.focus()], e: ["errors only, or all", () => trouble.click()] };
    this.ready = this.load();
  }

  set(name, value) {
    this.wanted[name] = value;
    this.load().catch((error) => (this.count.textContent = error.message));
  }

  async load() {
    clearTimeout(this.later);
    const asked = (this.asked = Symbol());
    const found = await ask("logs", { run: this.id, ...Object.fromEntries(Object.entries(this.wanted).filter(([, value]) => value)) });
    if (asked !== this.asked || this.isClosed) return;
    if (this.app.lines.get(this.id)?.state === "running") this.later = setTimeout(() => this.load().catch((error) => (this.count.textContent = error.message)), AGAIN_MS);
    for (const name of found.members) if (![...this.members.options].some((option) => option.value === name)) this.members.append(h("option", { value: name }, name));
    this.members.value = this.wanted.member ?? "";
    this.told.replaceChildren(...found.failures.toReversed().map(failure));
    this.count.textContent = found.members.length ? `${number(found.lines.length)} lines${found.more ? `, and ${number(found.more)} before them in the files` : ""}` : "No actor has printed anything yet.";
    const isAtEnd = this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 4;
    this.lines.replaceChildren(...found.lines.map((line) => h(`div.line${line.trouble ? ".trouble" : ""}`, {}, h("time", {}, line.time.slice(11, 19)), h("b", {}, line.member), h("span", {}, line.text))));
    if (isAtEnd || !this.wasShown) this.lines.scrollTop = this.lines.scrollHeight;
    this.wasShown = true;
  }

  async changed(ids) {
    if (!ids || ids.has(this.id)) await this.load();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.later);
  }
}

/** An event that tells of something that went wrong, the newest first. */
function failure(event) {
  const what = [event.error, event.message ?? event.reason].filter(Boolean).join(": ");
  const where = event.member ? ` ${event.member}` : "";
  return h("div.notice", {}, h("b", {}, `${String(event.time ?? "").slice(11, 19)} ${event.kind}${where}: `), what || JSON.stringify(event));
}
