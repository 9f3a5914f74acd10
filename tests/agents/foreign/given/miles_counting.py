"""A server of OpenEnv: three steps, of which each that says the next number is right."""

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class CountAction(Action):
    text: str


class CountObservation(Observation):
    told: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self._seed = State(step_count=0), 0

    def reset(self, seed=None, episode_id=None, **options):
        self._state, self._seed = State(step_count=0), seed or 0
        return CountObservation(told=f"begin {self._seed}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **options):
        if action.text == "raise":
            raise ValueError("of the environment")
        self._state.step_count += 1
        count = self._state.step_count
        is_right = action.text == str(self._seed + count)
        told = f"{action.text} is {'right' if is_right else 'wrong'}"
        return CountObservation(told=told, done=count >= 3, reward=float(is_right))

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Counting, CountAction, CountObservation, max_concurrent_envs=64)
