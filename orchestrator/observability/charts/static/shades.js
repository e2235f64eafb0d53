// What the background of a token can tell.
import { color, faded } from "./colors.js";
import { number } from "./dom.js";

const at = (value, index) => (Array.isArray(value) ? value[index] : value);
const isKnown = (value) => value !== undefined && value !== null;
const NOTHING = { shade: "", tip: "" };

/** The mean advantage of each turn's tokens, in the order of the tokens; null where none is known. */
export function credits(sample) {
  let end = 0;
  return (sample.turn_tokens ?? []).map((count) => {
    const known = Array.from({ length: count }, (_, index) => at(sample.advantage, end + index)).filter(isKnown);
    end += count;
    return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
  });
}

export const SHADES = {
  logprob: { title: "log-probability", about: "The darker, the less likely the engine found the token." },
  difference: { title: "trainer against engine", about: "The darker, the more their log-probabilities differ. Blue: the trainer finds the token likelier. Orange: less likely. No colour: they agree." },
  mask: { title: "left out of the loss", about: "Coloured tokens did not move the weights: their advantage was 0, their ratio was clipped, a correction masked them, or their turn was too old." },
  advantage: { title: "advantage", about: "Green: made more likely. Red: made less likely." },
  version: { title: "version of the weights", about: "Tokens of one colour were sampled under the same weights." },
  turn: { title: "turn", about: "Each turn of the attempt has a colour of its own." },
};

const OF = {
  logprob(sample, index) {
    const value = at(sample.behavior_logprobs, index);
    if (!isKnown(value)) return { shade: "", tip: "log-probability not written" };
    return { shade: faded(color(4), Math.min(0.75, -value / 6)), tip: `log p ${number(value)}, p ${number(Math.exp(value), 3)}` };
  },
  difference(sample, index) {
    const [engine, trainer] = [at(sample.behavior_logprobs, index), at(sample.trainer_logprobs, index)];
    if (!isKnown(engine) || !isKnown(trainer)) return { shade: "", tip: "the trainer's log-probability is not known" };
    const difference = trainer - engine;
    const depth = 0.75 * Math.min(1, Math.sqrt(Math.abs(difference))); // 0.01, of bfloat16, is barely seen
    return { shade: faded(color(difference > 0 ? 0 : 1), depth), tip: `trainer ${number(trainer)}, engine ${number(engine)}, difference ${number(difference)}` };
  },
  mask(sample, index) {
    const moves = at(sample.loss_mask, index);
    if (!isKnown(moves)) return { shade: "", tip: "not known" };
    return moves ? { shade: "", tip: "moved the weights" } : { shade: faded(color(3), 0.45), tip: whyLeftOut(sample, index) };
  },
  advantage(sample, index) {
    const value = at(sample.advantage, index);
    if (!isKnown(value)) return NOTHING;
    return { shade: faded(color(value > 0 ? 2 : 4), Math.min(0.6, Math.abs(value) / 3)), tip: `advantage ${number(value)}` };
  },
  version(sample, index) {
    const value = at(sample.token_versions, index);
    return isKnown(value) ? { shade: faded(color(value), 0.35), tip: `version ${value}` } : NOTHING;
  },
  turn(sample, index) {
    let [turn, end] = [0, 0];
    for (const count of sample.turn_tokens ?? []) {
      end += count;
      if (index < end) break;
      turn += 1;
    }
    return { shade: faded(color(turn), 0.3), tip: `turn ${turn + 1}` };
  },
};

export const shadeOf = (kind, sample, index) => OF[kind](sample, index);

function whyLeftOut(sample, index) {
  if (at(sample.advantage, index) === 0) return "did not move the weights: advantage 0";
  if (Array.isArray(sample.trainer_logprobs) && !isKnown(sample.trainer_logprobs[index])) return "did not move the weights: its turn was too old";
  return "did not move the weights: clipped, or masked by a correction";
}
