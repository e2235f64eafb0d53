// A server of other people's loops: who its tenants are, what each has used, and what their clients wait for.
import { ask } from "../api.js";
import { elapsed, h, number } from "../dom.js";
import { tabKeys, tabs } from "../tabs.js";

const AGAIN_MS = 2000;
const OLD_S = 15;
const TENANT = ["tenant", "share", "clients", "on ranks", "requests", "failed", "refused", "waiting", "wait for ranks", "wait for engines", "tokens trained", "tokens sampled", "time on ranks", "GiB saved", "tokens a minute"];
const CLIENT = ["client", "tenant", "rank", "next request", "waiting", "where", "waits for"];

const WORDS = ["tenant", "client", "where", "waits for"];

export class TenantsPage {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.title = `${id} › tenants`;
    this.shown = h("div", {}, h("p.faint", {}, "…"));
    this.tabs = h("div");
    this.element = h("div", {}, this.tabs, this.shown);
    this.ready = this.load();
  }

  async load() {
    clearTimeout(this.later);
    const { line, serving } = await ask("serving", { run: this.id });
    if (this.isClosed) return;
    this.tabs.replaceChildren(tabs(this.id, "tenants"));
    const goesOn = line.state === "running";
    if (goesOn) this.later = setTimeout(() => this.load().catch((error) => this.shown.prepend(h("div.notice", {}, error.message))), AGAIN_MS);
    if (!serving) {
      this.shown.replaceChildren(h("p.faint", {}, goesOn ? "The server is starting its ranks and engines." : "This is no server: penstock serve makes one."));
      return;
    }
    const age = Date.now() / 1000 - serving.time;
    const tenants = Object.entries(serving.tenants);
    const clients = tenants.flatMap(([tenant, told]) => told.clients.map((client) => ({ tenant, ...client })));
    this.shown.replaceChildren(
      h("h1", {}, serving.model.name),
      h("p", {}, h(`span.state.${line.state}`, {}, line.state), h("span.faint", {}, ` ${serving.url} · ${serving.is_ending ? "ending · " : ""}ranks lost ${number(serving.losses_of_ranks)} times, engines ${number(serving.losses_of_engines)} times`)),
      goesOn && age > OLD_S ? h("div.notice", {}, `The server has told nothing for ${elapsed(age)}.`) : "",
      h("h2", {}, "Tenants"), table(TENANT, WORDS, tenants.map(([name, told]) => tenantRow(name, told))),
      h("h2", {}, "Training clients"), clients.length ? table(CLIENT, WORDS, clients.map(clientRow)) : h("p.faint", {}, "Nobody trains."));
  }

  async changed(ids) {
    if (!ids || ids.has(this.id)) await this.load();
  }

  get keys() {
    return tabKeys(this.id);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.later);
  }
}

/** Titles of columns of numbers are those that are not among `words`. */
function table(titles, words, rows) {
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, titles.map((title) => h(words.includes(title) ? "th" : "th.number", {}, title)))), h("tbody", {}, rows)));
}

function tenantRow(name, { share, clients, usage, tokens_per_minute: limit, paused_s: paused, max_adapters: most }) {
  const requests = Object.values(usage.requests ?? {}).reduce((sum, count) => sum + count, 0);
  const wait = (place) => usage.wait_seconds_count?.[place] ? elapsed(usage.wait_seconds_sum[place] / usage.wait_seconds_count[place]) : "–";
  const pause = paused ? h("span.bad", {}, ` paused for ${elapsed(paused)}`) : null;
  return h("tr", { "data-tenant": name }, h("td", {}, name),
    [number(share), `${clients.length} of ${most}`, number(clients.filter((client) => client.on_ranks).length), number(requests), number(usage.failures), number(usage.refused_requests), number(usage.requests_waiting),
      wait("ranks"), wait("engines"), number(usage.tokens_trained), number(usage.tokens_sampled), elapsed(usage.seconds_trained), number(usage.stored_bytes / 2 ** 30)].map((value) => h("td.number", {}, value)),
    h("td.number", {}, limit ? number(limit) : "any", pause));
}

function clientRow({ id, tenant, rank, next, waiting, on_ranks: here, waits_for: reason }) {
  return h("tr", { "data-client": id }, h("td", {}, id), h("td", {}, tenant), [number(rank), number(next), number(waiting)].map((value) => h("td.number", {}, value)),
    h("td", {}, here ? "ranks" : "disk"), h("td.wide", {}, reason));
}
