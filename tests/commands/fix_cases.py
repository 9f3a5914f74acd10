"""Command lines that are refused, and what the refusal says: a table for `test_fixes_work`."""

from __future__ import annotations

QUICK = "launch -r quickstart --dry-run"
OWN = (
    "launch -r own.yaml --set data.prompts=sums.jsonl --set data.eval=null --set eval.every=0 "
    "--set rollout.reward=gsm8k --dry-run"
)
TO_TINY = f"{QUICK} --set model.scratch=null --set warmup.steps=0 --set model.path="
_ROWS = f"{QUICK} --set data.prompts=null --set warmup.steps=0 --set data.eval=null --set "
SFT = f"{_ROWS}train.objective=supervised --set data.train=chats.jsonl --set eval.every=0"
DPO = f"{_ROWS}train.objective=preference --set data.train=pairs.jsonl --set eval.every=0"
LORA = f"{QUICK} --lora 4"
MOE = (
    f"{QUICK} --set model.scratch.family=qwen3_moe --set model.scratch.num_experts=4 "
    "--set model.scratch.tie_embeddings=false"
)
ROLES = f"{QUICK} --set rollout.agent=multi_agent --set 'rollout.roles="
CHAT = f"{QUICK} --set rollout.agent=chat --set rollout.max_turns=2"
JUDGE = f"{QUICK} --set rollout.reward=judge --set rollout.judge.url=http://127.0.0.1:1/v1"
MTP = f"{QUICK} --set train.mtp.loss_weight=0.1"

COMMANDS = {
    "launch -r quickstrat --dry-run": "there is no recipe",
    "launch -r own --dry-run": "there is no recipe",
    "recipes show quickstrat": "there is no recipe",
    "launch -r ./owm.yaml --dry-run": "own.yaml",
    f"{QUICK} --set train.stps=3": "train.stps",
    f"{QUICK} --set =3": "is not a valid override",
    f"{QUICK} --set 'rollout.stpo=[a, b]'": "rollout.stpo",
    f"{QUICK} --set 'data.prompts=[sums.jsonl, train.jsonl]' --set data.demonstrations=null": (
        "no examples to imitate"
    ),
    f"{QUICK} --set train.covariance.low=5 --set train.covariance.high=5": "nothing lies between",
    f"{QUICK} --set rollout.reward=length --set rollout.max_response_tokens=1": (
        "the length penalty cannot start"
    ),
    f"{QUICK} --set train.steps=many": "train.steps",
    f"{QUICK} --set train.steps=0": "train.steps",
    f"{QUICK} --set train.algorithm=gsppo": "gsppo",
    f"{QUICK} --set rollout.filter=zero_varianc": "zero_v",
    f"{QUICK} --set rollout.reward=gms8k": "no reward",
    f"{QUICK} --set rollout.reward=mine.strict": "no reward",
    f"{QUICK} --set rollout.reward=mine:strct": "has no `strct`",
    f"{QUICK} --set run.trackers=[tensorbord]": "no run_tracker",
    f"{QUICK} --set train.updates_per_step=3": "32 prompts",
    f"{QUICK} --set rollout.samples_per_prompt=1": "groups of one",
    f"{QUICK} --set model.path=Tiny-Model --set data.prompts=sums.jsonl": "names two models",
    f"{TO_TINY}./Tiny-Modl": "the model ./Tiny-Modl does not exist",
    f"{TO_TINY}Tiny-Model": "designed for a model from scratch",
    f"{OWN} --set model.path=No-Template": "no chat template",
    OWN.replace("sums.jsonl", "sum.jsonl"): "there is no file",
    f"{OWN} --set data.label_key=anser": "no column",
    f"{OWN} --set data.max_prompt_tokens=2": "longer than 2",
    f"{OWN} --set rollout.max_response_tokens=1000": "model's positions",
    OWN.replace("data.eval=null", "data.eval=sums.jsonl"): "are also training prompts",
    f"{QUICK} --name taken": "is in use",
    "data check sum.jsonl": "there is no file",
    "algorithms gsppo": "there is no algorithm",
    "data check sums.jsonl --prompt-key qestion": "no column `qestion`",
    "status nosuch": "there is no run",
    "models ./nosuch": "the model ./nosuch does not exist",
    "plugins check mine:strct": "has no `strct`",
    # optimizer and algorithm
    f"{QUICK} --set train.optimizer.warmup_steps=999": "never reach its value",
    f"{QUICK} --set train.optimizer.min_lr=1": "would rise instead of fall",
    f"{QUICK} --set train.optimizer.beta1=1": "beta1` cannot be 1",
    f"{QUICK} --set train.optimizer.beta2=1": "beta2` cannot be 1",
    f"{QUICK} --set train.routing_replay=true": "no routing to replay",
    f"{QUICK} --set train.advantage=pass_at_k --set train.pass_k=8": "teaches nothing",
    f"{QUICK} --set train.algorithm=max_rl --set rollout.shaping=overlong": "does not support",
    f"{QUICK} --set train.clip_low=1.5": "`train.clip_low` cannot be",
    f"{QUICK} --set train.ratio=sequence --set train.surrogate=reinforce": "ratio",
    f"{QUICK} --set train.surrogate=cispo --set train.dual_clip=3": "has no effect on",
    f"{QUICK} --set train.covariance.low=2 --set train.covariance.high=1": "nothing lies between",
    f"{QUICK} --set train.algorithm=ppo --set train.critic.warmup_steps=999": "never learn",
    f"{MOE} --set train.algorithm=ppo --set train.routing_replay=true": "a critic",
    f"{QUICK} --set train.kl_coef=0.1 --set train.reference=false": "a KL term needs a reference",
    f"{QUICK} --set train.reference_every=3": "no reference to update",
    f"{QUICK} --set train.entropy_target=1 --set train.entropy_coef=9": "exceeds its bound",
    f"{QUICK} --set train.kl_unbiased=true --set train.kl_in=reward": "needs the KL term",
    f"{QUICK} --set train.correction.kind=importance --set rollout.max_staleness=2": "twice",
    f"{QUICK} --set train.correction.kind=importance --set train.correction.mode=none": "no effect",
    f"{QUICK} --set rollout.top_p=0.9": "a different distribution",
    f"{QUICK} --set rollout.top_k=20": "a different distribution",
    f"{QUICK} --set rollout.top_k=0": "`rollout.top_k` cannot be",
    f"{QUICK} --set rollout.selection=variance": "nothing to choose from",
    f"{QUICK} --set data.curriculum=learnable --set rollout.max_staleness=2": "runs ahead",
    # rollout
    f"{QUICK} --set 'rollout.stop=[\"\"]'": "an empty string",
    f"{QUICK} --set rollout.order=done": "needs groups to choose from",
    f"{QUICK} --set rollout.order=done --set rollout.max_staleness=2 "
    "--set rollout.over_sampling=2": "would waste samples",
    f"{QUICK} --set train.precision=fp8_block --set rollout.precision=int4": "rollout.precision",
    f"{QUICK} --set rollout.precision=fp8_block --set weights.format=mine:Format": "weights.format",
    f"{QUICK} --set rollout.reward={{}}": "does not name a reward",
    f"{QUICK} --set 'rollout.reward={{math: 0}}'": "all weights of",
    f"{QUICK} --set rollout.reward=length --set rollout.length.target_tokens=999": "cannot start",
    f"{QUICK} --set rollout.reward=judge": "needs an address",
    f"{QUICK} --set rollout.reward=judge --set rollout.judge.url=nowhere": "cannot be `nowhere`",
    JUDGE: "the judge needs a model",
    f"{JUDGE} --set rollout.judge.model=a --set rollout.judge.parse=x": "cannot be `x`",
    f"{QUICK} --set rollout.reward=remote": "needs an address",
    f"{QUICK} --set rollout.reward=none": "no reward to learn from",
    # data
    f"{QUICK} --set data.prompts=null": "the recipe has no prompts",
    f"{QUICK} --set data.demonstrations=null": "no examples to imitate",
    f"{QUICK} --set data.eval=null": "the evaluation every",
    f"{QUICK} --set 'data.mix=[{{path: sums.jsonl}}]'": "two sources of",
    f"{QUICK} --set data.train=chats.jsonl": "two sources of training data",
    f"{QUICK} --set train.objective=supervised": "no training data",
    f"{QUICK} --set data.train=chats.jsonl --set data.prompts=null": "cannot learn from rows",
    f"{QUICK} --set train.epochs=1": "only applies to runs that learn from rows",
    f"{QUICK} --set data.validation=chats.jsonl": "only applies to runs that learn from rows",
    f"{SFT} --set train.updates_per_step=2": "cannot be split into several updates",
    f"{SFT} --set eval.every=0".replace("eval.every=0", "eval.every=2"): "the evaluation every",
    f"{SFT} --set data.validation=chats.jsonl": "`data.validation` is the same as `data.train`",
    f"{SFT} --set train.kl_coef=0.1": "`train.kl_coef` has no effect on",
    f"{SFT} --set train.entropy_target=0.5": "`train.entropy_target` has no effect on",
    f"{DPO} --set train.reference=true": "`train.reference=true` has no effect on",
    f"{DPO} --set train.reference_every=5": "no reference to update",
    f"{DPO} --set train.preference.loss=kto --set train.reference=false": "needs a reference",
    f"{DPO} --set train.preference.loss=kto --set train.batch_size=1": "several rows a step",
    f"{SFT} --set data.max_row_tokens=9999": "exceeds the model's positions",
    f"{SFT} --set rollout.speculative.kind=ngram": "speed up",
    f"{DPO} --set train.objective=reward_model".replace(
        "--set train.objective=preference ", ""
    ).replace("warmup.steps=0", "warmup.steps=2 --set data.demonstrations=sums.jsonl"): "warm-up",
    f"{QUICK} --set data.prompts=sums.jsonl[5:2]": "rows are written",
    f"{QUICK} --set data.prompts=hf:a:b:c:d": "data set of the hub",
    f"{QUICK} --set data.prompts=task:": "does not name a task",
    f"{QUICK} --set data.prompts=task:sms": "task",
    f"{QUICK} --set data.chat_template=nosuch.jinja": "cannot be read",
    # the model
    f"{QUICK} --set model.scratch=null --set warmup.steps=0": "does not name a model",
    f"{QUICK} --set model.revision=main": "is not downloaded",
    f"{QUICK} --set model.scratch.num_kv_heads=3": "cannot share",
    f"{QUICK} --set model.scratch.head_dim=15": "cannot be 15",
    f"{QUICK} --set model.scratch.vocab_size=20": "vocab_size` cannot be",
    f"{QUICK} --set rollout.max_response_tokens=9999": "exceed the model's positions",
    f"{QUICK} --set model.scratch.family=qwen3_moe": "needs experts",
    f"{QUICK} --set model.scratch.num_experts=4": "a dense model has no experts",
    MOE.replace("tie_embeddings=false", "tie_embeddings=true"): "cannot tie its embeddings",
    f"{MOE} --set model.scratch.topk=9": "cannot use 9",
    # adapters
    f"{LORA} --set train.lora.type=dora": "cannot be served",
    f"{LORA} --set train.lora.dropout=0.1": "learns from samples",
    f"{LORA} --set weights.format=mine:Format": "with an adapter",
    f"{LORA} --set train.lora.targets=[q_prj]": "q_prj",
    f"{LORA} --set train.lora.experts=shared_outer": "does not apply to any expert",
    f"{LORA} --set parallel.etp=2 --set parallel.tp=1": "parallel.etp",
    f"{LORA} --set train.mtp.loss_weight=0.1": "together with an adapter",
    f"{LORA} --adapter a=nosuch.yaml": "nosuch.yaml",
    # guessing ahead
    f"{QUICK} --set rollout.speculative.kind=draft": "the draft model is missing",
    f"{QUICK} --set rollout.speculative.revision=main": "no model is downloaded",
    f"{QUICK} --set rollout.speculative.ngram_breadth=3": "only applies to n-grams",
    f"{QUICK} --set rollout.speculative.kind=ngram --set rollout.speculative.guesses=2 "
    "--set rollout.speculative.ngram_breadth=8": "alternatives",
    f"{LORA} --set rollout.speculative.kind=mtp": "speculate with mtp",
    f"{QUICK} --set rollout.speculative.kind=mtp --set weights.channel=distributed": "new weights",
    f"{QUICK} --set train.mtp.trains_trunk=true": "has no loss",
    f"{QUICK} --set train.draft.lr=1e-4": "no draft model to train",
    # agents
    f"{QUICK} --set rollout.agent=environment": "needs an environment",
    f"{QUICK} --set rollout.agent=tools": "needs tools",
    f"{QUICK} --set rollout.agent=tools --set rollout.tools=[calculatr]": "calculatr",
    f"{QUICK} --set rollout.agent=tols": "tols",
    f"{QUICK} --set rollout.agent=tools --set rollout.tools=[calculator] "
    "--set data.chat_template=none": "needs a chat template",
    f"{QUICK} --set rollout.agent=multi_agent": "needs roles",
    f"{ROLES}{{a: {{prompt: Go.}}}}' --set rollout.final_role=b": "there is no role",
    f"{ROLES}{{a: {{prompt: Go.}}, b: {{prompt: On.}}}}' --set rollout.max_turns=1": "exceeds",
    f"{ROLES}{{a: {{prompt: Go.}}, b: {{}}}}' --set rollout.final_role=a": "never gets a turn",
    f"{ROLES}{{a: {{prompt: Go.}}}}' --set rollout.rounds=2": "anything new",
    CHAT: "has no user",
    f"{CHAT} --set 'rollout.user.script=[\"\"]'": "an empty text",
    f"{CHAT} --set rollout.user.script=[a,b,c]": "before the script does",
    f"{CHAT} --set rollout.user.endpoint.url=http://127.0.0.1:1/v1": "endpoint without `model`",
    # the run and the machine
    f"{QUICK} --set run.name=.a": "`run.name` cannot be",
    f"{QUICK} --set name=a/b": "`name` cannot be",
    f"{QUICK} --set run.dir=''": "`run.dir` is empty",
    f"{QUICK} --set run.project=''": "`run.project` is empty",
    f"{QUICK} --set run.metrics_address=nowhere": "run.metrics_address",
    f"{QUICK} --set parallel.dp=64": "64",
    f"{QUICK} --set parallel.tp=3": "3",
    f"{QUICK} --set rollout.prompts_per_step=7 --set train.updates_per_step=2": "7 prompts",
    f"{QUICK} --set engines.num=0": "engines",
    f"{QUICK} --set eval.engines=own --set engines.num=1": "no engine would be left",
    # other commands
    "eval nosuch": "no run",
    "export nosuch --to out": "nosuch",
    "resume nosuch": "there is no run",
    "why nosuch": "there is no run",
    "convert hf-to-megatron nosuch out": "nosuch",
    "models check nosuch": "nosuch",
    "help recip": "recip",
    "doctor --recipe quickstrat": "there is no recipe",
    "data check quickstrat": "quickstrat",
    "data check sums.jsonl --label-key anser": "no column `anser`",
    "data check images.jsonl": "images",
}
"""Command line -> a part of the refusal."""

THEN = {
    f"{QUICK} --set model.scratch=null --set warmup.steps=0": (
        "designed for a model from scratch",
    ),
    f"{LORA} --set weights.format=mine:Format": ("Format",),
    f"{LORA} --set train.mtp.loss_weight=0.1": ("MTP", "model has no"),
    f"{LORA} --set rollout.speculative.kind=mtp": ("MTP", "model has no"),
    f"{QUICK} --set rollout.speculative.kind=mtp --set weights.channel=distributed": (
        "MTP",
        "model has no",
    ),
    f"{QUICK} --set train.mtp.trains_trunk=true": ("MTP", "model has no"),
    CHAT: ("endpoint without `model`",),
    f"{QUICK} --set rollout.agent=tols": ("needs tools",),
    f"{QUICK} --set model.path=Tiny-Model --set data.prompts=sums.jsonl": (
        "model's positions",
        "are also training prompts",
    ),
    f"{TO_TINY}Tiny-Model": ("model's positions",),
    f"{TO_TINY}./Tiny-Modl": ("designed for a model from scratch",),
    f"{QUICK} --set rollout.reward=judge": ("the judge needs a model",),
    f"{QUICK} --set rollout.reward=judge --set rollout.judge.url=nowhere": (
        "the judge needs a model",
    ),
    f"{QUICK} --set data.train=chats.jsonl --set data.prompts=null": ("has no label column",),
    f"{QUICK} --set rollout.precision=fp8_block --set weights.format=mine:Format": ("Format",),
}
"""Command line -> parts of the next refusals, which a fix leads to."""
