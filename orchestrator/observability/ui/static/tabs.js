// The pages of one run: links on top of each, and keys.
import { h } from "./dom.js";

const TABS = [["run", "Charts"], ["rollouts", "Rollouts"], ["timeline", "Timeline"], ["cluster", "Cluster"], ["logs", "Logs"]];

const addressOf = (kind, id) => `#/${kind}/${encodeURIComponent(id)}`;

export const tabs = (id, here) => h("nav.tabs", { "aria-label": "pages of the run" }, TABS.map(([kind, title]) =>
  h("a", { href: addressOf(kind, id), "aria-current": kind === here ? "page" : null }, title)));

export const tabKeys = (id) => Object.fromEntries(TABS.map(([kind, title], index) => [String(index + 1), [title.toLowerCase(), () => (location.hash = addressOf(kind, id))]]));
