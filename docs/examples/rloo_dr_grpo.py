"""RLOO advantages with Dr. GRPO's constant divisor: an algorithm of your own is one file.

cd docs/examples && export PYTHONPATH=$PWD
miles launch --recipe quickstart --set train.objective=rloo_dr_grpo:objective
"""

from milescli.train.aggregation import LossShare
from milescli.train.objectives.policy import Policy


def rloo(*, groups, settings):
    """A_i = r_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, section 3.3)."""
    advantages = []
    for group in groups:
        total, others = sum(group.rewards), max(len(group.rewards) - 1, 1)
        advantages.append([reward - (total - reward) / others for reward in group.rewards])
    return advantages


def objective(*, recipe):
    """Called once per process. The rest of the policy objective stays as the recipe says."""
    longest = recipe.rollout.max_response_tokens

    def constant(*, num_tokens, settings):
        """Each token weighs the same, whatever its response's length (arXiv 2503.20783, eq. 3)."""
        return LossShare(token_weight=1.0 / longest, count=1.0)

    return Policy(recipe=recipe, advantage=rloo, aggregation=constant)
