// Who is there and who waits for whom; rows and leases of the store; where which version of the weights serves.
import { ask } from "../api.js";
import { elapsed, h, number } from "../dom.js";
import { waitGraph } from "../graph.js";
import { tabKeys, tabs } from "../tabs.js";

const AGAIN_MS = 2000;
const STATES = ["waiting", "free", "leased", "done"];
const MOST_LEASES = 30;

export class ClusterPage {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.title = `${id} › cluster`;
    this.shown = h("div", {}, h("p.faint", {}, "…"));
    this.element = h("div", {}, tabs(id, "cluster"), this.shown);
    this.keys = tabKeys(id);
    this.ready = this.load();
  }

  async load() {
    clearTimeout(this.later);
    const { line, state } = await ask("state", { run: this.id });
    if (this.isClosed) return;
    const goesOn = line.state === "running" || line.state === "unfinished";
    if (goesOn) this.later = setTimeout(() => this.load().catch((error) => this.shown.prepend(h("div.notice", {}, error.message))), AGAIN_MS);
    if (!state) {
      this.shown.replaceChildren(h("p.faint", {}, goesOn ? "The run has not started its actors yet." : "The run has left no state."));
      return;
    }
    const age = Math.max(0, Date.now() / 1000 - state.time);
    this.shown.replaceChildren(
      h("p", {}, h(`span.state.${line.state}`, {}, line.state), h("span.faint", {}, goesOn ? ` step ${state.step}, ${elapsed(age)} ago` : ` The last that it told: step ${state.step}, ${new Date(state.time * 1000).toISOString().slice(0, 19).replace("T", " ")}`)),
      h("h2", {}, "Who waits for whom"), h("div.scroll", {}, waitGraph(state.members, state.waits)),
      state.waits.length ? h("ul.waits", {}, state.waits.map(({ who, on, what }) => h("li", {}, h("b", {}, who), " waits for ", h("b", {}, on), `: ${what}`))) : h("p.faint", {}, "Nobody waits."),
      ...store(state), ...weights(state), ...nodes(state));
  }

  async changed(ids) {
    if (!ids || ids.has(this.id)) await this.load();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.later);
  }
}

function store({ store: told }) {
  if (!told) return [h("h2", {}, "Store"), h("div.notice", {}, "The store did not answer: it is busy, or another takes its place.")];
  const most = Math.max(1, ...Object.values(told.rows).map((counts) => STATES.reduce((sum, state) => sum + counts[state], 0)));
  const bar = (counts) => h("span.stack", {}, STATES.map((state) => {
    const part = h(`i.${state}`, { title: `${number(counts[state])} ${state}` });
    part.style.width = `${(100 * counts[state]) / most}%`;
    return part;
  }));
  const dropped = Object.entries(told.counters).filter(([name, count]) => name.startsWith("dropped/") && count);
  const lacking = Object.entries(told.oldest_group_waits_for).map(([name, rows]) => `${name} (${rows})`).join(", ");
  return [
    h("h2", {}, "Store: rows by stage"),
    h("div.scroll", {}, h("table.rows", {}, h("thead", {}, h("tr", {}, h("th", {}, "stage"), h("th", {}, ""), STATES.map((state) => h("th.number", {}, state)), h("th.number", {}, "mean wait"))),
      h("tbody", {}, Object.entries(told.rows).map(([stage, counts]) => h("tr", { "data-stage": stage }, h("td", {}, stage), h("td", {}, bar(counts)),
        STATES.map((state) => h("td.number", {}, number(counts[state]))), h("td.number", {}, `${told.wait_s[stage].toFixed(3)} s`)))))),
    h("p.faint", {}, `Groups ${told.credits.active} of ${told.credits.max}. `,
      told.oldest_group === null ? "" : `The oldest, ${told.oldest_group}, ${lacking ? `lacks ${lacking}` : "is complete"}. `,
      dropped.length ? `Dropped: ${dropped.map(([name, count]) => `${name.slice(8)} ${number(count)}`).join(", ")}.` : "Nothing was dropped."),
    h("h2", {}, "Leases"),
    told.leases.length ? h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, ["held by", "stage"].map((name) => h("th", {}, name)), ["rows", "held for", "runs out in"].map((name) => h("th.number", {}, name)))),
      h("tbody", {}, told.leases.slice(0, MOST_LEASES).map((lease) => h("tr", {}, h("td", {}, lease.owner), h("td", {}, lease.stage), h("td.number", {}, number(lease.open_rows)),
        h("td.number", {}, lease.held_s === null ? "–" : `${lease.held_s.toFixed(1)} s`), h("td.number", {}, lease.expires_in_s === null ? "never" : `${lease.expires_in_s.toFixed(0)} s`)))))) : h("p.faint", {}, "Nobody holds any."),
  ];
}

function weights({ weights: told, members }) {
  const ranks = members.filter((member) => member.role === "trainer").map((member) => member.name);
  const serving = Object.entries(told.serving);
  const newest = Math.max(told.told, told.loading ?? 0);
  return [
    h("h2", {}, "Weights"),
    h("div.way", {}, h("div.stop", {}, h("b", {}, ranks.length > 3 ? `${ranks.length} ranks` : ranks.join(", ")), h("span", {}, told.loading === null ? "between two versions" : `published version ${told.loading}`)), h("span.to", { "aria-hidden": "true" }, "→"),
      serving.length ? serving.map(([name, version]) => h(`div.stop${version < newest ? ".old" : ""}`, {}, h("b", {}, name), h("span", {}, `version ${version}`))) : h("div.stop", {}, h("b", {}, "engines"), h("span", {}, "the starting model")),
      h("span.to", { "aria-hidden": "true" }, "→"), h("div.stop", {}, h("b", {}, "store"), h("span", {}, `admits for version ${told.told}`))),
  ];
}

function nodes({ nodes: machines, members, weights: { serving } }) {
  const title = (id) => machines.find((node) => node.id === id)?.name ?? "–";
  return [
    h("h2", {}, "Actors"),
    h("p.faint", {}, machines.map((node) => `${node.name} (${node.address}): ${number(node.cpus)} CPU${node.gpus ? `, ${number(node.gpus)} GPU` : ""}`).join(" · ")),
    h("div.scroll", {}, h("table.members", {}, h("thead", {}, h("tr", {}, ["actor", "node", "does"].map((name) => h("th", {}, name)), ["for", "done", "in flight", "version"].map((name) => h("th.number", {}, name)))),
      h("tbody", {}, members.map((member) => h("tr", { "data-member": member.name }, h("td", {}, member.name), h("td", {}, title(member.node)), h("td", {}, member.phase ?? h("span.bad", {}, "does not answer")),
        h("td.number", {}, member.phase ? elapsed(member.phase_s) : "–"), h("td.number", {}, number(member.num_done ?? null)), h("td.number", {}, number(member.num_in_flight ?? null)), h("td.number", {}, number(serving[member.name] ?? null))))))),
  ];
}
