// The pages of one run: links on top of each, and keys.
import { h } from "./dom.js";

const TABS = [["run", "Charts"], ["rollouts", "Rollouts"], ["timeline", "Timeline"], ["cluster", "Cluster"], ["logs", "Logs"]];
const TABS_OF_SERVER = [["tenants", "Tenants"], ["logs", "Logs"], ["run", "Events"]];
const servers = new Set();
const tabsOf = (id) => (servers.has(id) ? TABS_OF_SERVER : TABS);

/** Notes which runs are servers of other people's loops. */
export const noteServers = (lines) => lines.forEach((line) => line.is_server && servers.add(line.id));

const addressOf = (kind, id) => `#/${kind}/${encodeURIComponent(id)}`;

export const tabs = (id, here) => h("nav.tabs", { "aria-label": "pages of the run" }, tabsOf(id).map(([kind, title]) =>
  h("a", { href: addressOf(kind, id), "aria-current": kind === here ? "page" : null }, title)));

export const tabKeys = (id) => Object.fromEntries(tabsOf(id).map(([kind, title], index) => [String(index + 1), [title.toLowerCase(), () => (location.hash = addressOf(kind, id))]]));
