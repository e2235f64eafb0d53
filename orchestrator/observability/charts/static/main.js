// Which page the address names, what every page shares: the table of runs, live changes, keys, light and dark.
import { ask, listen } from "./api.js";
import { h } from "./dom.js";
import { ClusterPage } from "./pages/cluster.js";
import { ComparePage } from "./pages/compare.js";
import { LogsPage } from "./pages/logs.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { RunPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { TenantsPage } from "./pages/tenants.js";
import { TimelinePage } from "./pages/timeline.js";
import { noteServers } from "./tabs.js";

const place = (id) => document.getElementById(id);

class App {
  lines = new Map();
  isListed = false; // whether the server has told which runs there are
  page = null;
  wasOff = false; // what is shown may be old, or an error
  trouble = h("div.notice", { role: "alert" });

  async start() {
    this.paint(localStorage.getItem("theme"));
    place("theme").onclick = () => this.toggle();
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.pressed(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.page?.themed?.());
    this.open(); // it asks for what it shows while the table of runs is on its way
    await this.list();
    listen((change) => this.heard(change), (state) => {
      if (state === "off") this.wasOff = true;
      place("live").className = `live ${state}`;
      place("live").textContent = state === "on" ? "live" : "not connected";
    });
  }

  async list() {
    try {
      await this.anew();
      if (this.page instanceof RunsPage) this.page.show();
    } catch (error) {
      this.troubled(error);
    }
  }

  /** Asks for all lines; ids of the runs that have changed. */
  async anew() {
    const before = this.lines;
    this.lines = new Map((await ask("runs")).map((line) => [line.id, line]));
    this.isListed = true;
    noteServers([...this.lines.values()]);
    const ids = [...new Set([...before.keys(), ...this.lines.keys()])];
    return ids.filter((id) => JSON.stringify(before.get(id)) !== JSON.stringify(this.lines.get(id)));
  }

  async heard({ anew, runs }) {
    try {
      const ids = new Set(anew ? await this.anew() : Object.keys(runs));
      for (const [id, line] of Object.entries(runs ?? {})) line ? this.lines.set(id, line) : this.lines.delete(id);
      if (ids.size || this.wasOff) await this.page?.changed(this.wasOff ? null : ids);
      this.wasOff = false;
      this.trouble.remove();
    } catch (error) {
      this.troubled(error);
    }
  }

  /** What is shown stays: the run may have been removed. */
  troubled(error) {
    this.trouble.textContent = error.message;
    place("page").prepend(this.trouble);
  }

  open() {
    const [, kind, rest = ""] = location.hash.match(/^#\/(\w*)\/?(.*)$/) ?? [];
    this.page?.close();
    const [names, query] = rest.split("?");
    const ids = names.split(",").map(decoded);
    const pages = {
      run: () => new RunPage(this, ids[0]), rollouts: () => new RolloutsPage(this, ids[0], query), compare: () => new ComparePage(this, ids),
      timeline: () => new TimelinePage(this, ids[0], query), cluster: () => new ClusterPage(this, ids[0]), logs: () => new LogsPage(this, ids[0], query),
      tenants: () => new TenantsPage(this, ids[0]),
    };
    this.page = Object.hasOwn(pages, kind ?? "") ? pages[kind]() : new RunsPage(this);
    document.title = this.page.title ? `${this.page.title} – Penstock` : "Penstock";
    place("crumbs").replaceChildren(...(this.page.title ? ["› ", this.page.title] : []));
    place("page").replaceChildren(this.page.element);
    scrollTo(0, 0);
    const { page } = this;
    page.ready?.catch((error) => page.element.replaceChildren(h("div.notice", {}, error.message), h("p", {}, h("a", { href: "#/" }, "All runs"))));
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const own = this.page?.keys?.[event.key] ?? this.keys[event.key];
    if (!own || (event.key === "Enter" && event.target.closest("a, button, summary"))) return;
    event.preventDefault();
    own[1]();
  }

  keys = {
    g: ["all runs", () => (location.hash = "#/")],
    d: ["light or dark", () => this.toggle()],
    "?": ["these keys", () => this.help()],
  };

  help() {
    const rows = Object.entries({ ...this.page?.keys, ...this.keys });
    place("help").replaceChildren(h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, rows.map(([key, [what]]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, what))))),
      h("form", { method: "dialog" }, h("button", {}, "Close")));
    place("help").showModal();
  }

  toggle() {
    const dark = document.documentElement.classList.contains("dark") || (!document.documentElement.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    this.paint(dark ? "light" : "dark");
    localStorage.setItem("theme", dark ? "light" : "dark");
    this.page?.themed?.();
  }

  paint(theme) {
    document.documentElement.classList.remove("light", "dark");
    if (theme) document.documentElement.classList.add(theme);
  }
}

/** Of an address; as it is where somebody has typed what is no escape. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

new App().start();
