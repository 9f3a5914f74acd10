"""An agent of your own: the policy answers, is asked to check itself, and answers again.

    cd docs/examples && export PYTHONPATH=$PWD
    miles launch --recipe quickstart --set rollout.agent=ask_twice:ask_twice \
      --set rollout.max_response_tokens=96
"""

from milescli.rollout.base import Outcome

CHECK = [10, 10]
"""Token ids that stand between the two responses; an agent for a real model would render them with
its chat template."""


async def ask_twice(prompt, session):
    """Both responses are trained on; the last one is scored by the recipe's reward."""
    first = await session.generate(prompt.token_ids, max_new_tokens=32)
    second = await session.generate(
        [*prompt.token_ids, *first.response_ids, *CHECK], max_new_tokens=32
    )
    return Outcome(text=second.text)
