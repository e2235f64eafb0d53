// What the background of a token can tell.
import { color, faded } from "./colors.js";
import { number } from "./dom.js";

const at = (value, index) => (Array.isArray(value) ? value[index] : value);

export const SHADES = {
  logprob: { title: "log-probability", about: "The darker, the less likely the engine found the token." },
  advantage: { title: "advantage", about: "Green: made more likely. Red: made less likely." },
  version: { title: "version of the weights", about: "Tokens of one colour were sampled under the same weights." },
  turn: { title: "turn", about: "Each turn of the attempt has a colour of its own." },
};

export function shadeOf(kind, sample, index) {
  if (kind === "logprob") {
    const value = at(sample.behavior_logprobs, index);
    if (value === undefined || value === null) return { shade: "", tip: "log-probability not written" };
    return { shade: faded(color(4), Math.min(0.75, -value / 6)), tip: `log p ${number(value)}, p ${number(Math.exp(value), 3)}` };
  }
  if (kind === "advantage") {
    const value = at(sample.advantage, index);
    if (value === undefined || value === null) return { shade: "", tip: "" };
    return { shade: faded(color(value > 0 ? 2 : 4), Math.min(0.6, Math.abs(value) / 3)), tip: `advantage ${number(value)}` };
  }
  if (kind === "version") {
    const value = at(sample.token_versions, index);
    return value === undefined || value === null ? { shade: "", tip: "" } : { shade: faded(color(value), 0.35), tip: `version ${value}` };
  }
  let turn = 0;
  let end = 0;
  for (const count of sample.turn_tokens ?? []) {
    end += count;
    if (index < end) break;
    turn += 1;
  }
  return { shade: faded(color(turn), 0.3), tip: `turn ${turn + 1}` };
}
