"""Advantages from rewards: the amount by which a sample, or a token, is better than was to be expected.

Pure functions, called by the `compute` stages of a dataflow with one tensor a column read.

    outcome.py    of whole responses: one formula, a centre and a scale, of the group or of the batch; its presets and
                  related formulas, by name: grpo, dr_grpo, rloo, reinforce_plus_plus, opo, remax, gpg …
    temporal.py   of tokens: a reward and a KL penalty as rewards of tokens, with values to advantages and returns
                  (GAE), whitening; and of turns, by what they are given: turn_rloo
    roles.py      of the sides of a game, each with a baseline that follows its rewards: rae

A stage sees one group at a time: presets take all of its samples as one group if they get no `group_ids`. What needs
statistics of the batch wants the batch's rewards, `[N]`, and says so.

A user's own advantage, from any file: `@advantage("mine")`, see `outcome.py`.
"""

from penstock.algorithms.advantages.outcome import ADVANTAGES as ADVANTAGES
from penstock.algorithms.advantages.outcome import advantage as advantage
from penstock.algorithms.advantages.outcome import dr_grpo as dr_grpo
from penstock.algorithms.advantages.outcome import finite_rewards as finite_rewards
from penstock.algorithms.advantages.outcome import gpg as gpg
from penstock.algorithms.advantages.outcome import group_advantage as group_advantage
from penstock.algorithms.advantages.outcome import normalized as normalized
from penstock.algorithms.advantages.outcome import opo as opo
from penstock.algorithms.advantages.outcome import reinforce_plus_plus as reinforce_plus_plus
from penstock.algorithms.advantages.outcome import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from penstock.algorithms.advantages.outcome import remax as remax
from penstock.algorithms.advantages.outcome import rloo as rloo
from penstock.algorithms.advantages.roles import role_advantage as role_advantage
from penstock.algorithms.advantages.temporal import gae as gae
from penstock.algorithms.advantages.temporal import token_rewards as token_rewards
from penstock.algorithms.advantages.temporal import turn_rloo as turn_rloo
from penstock.algorithms.advantages.temporal import unpadded as unpadded
from penstock.algorithms.advantages.temporal import whitened as whitened
