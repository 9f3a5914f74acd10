"""Which tests `make test` leaves to `make test-all`: the one place where that is decided.

`make test` runs a representative of each capability with real engines, trainers and Ray, and all
quick tests. `make test-all` runs all variants, combinations and layouts, too. A test that is left
out has the marker `thorough`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = (
    *("qwen3", "qwen3-moe", "glm4-moe-mtp", "deepseek-v32", "qwen3-next", "gpt-oss", "gemma4"),
    *("qwen3-5-moe-stacked-beside-vision", "nemotron-h-moe", "deepseek-v4"),
    "qwen3-vl-moe-released",
)
"""One of each class: dense, experts, biases, MTP, latent and sparse attention, linear attention,
towers that are left out and that are computed, sinks, sandwich norms, Mamba, compressed
attention."""
LAYOUTS = (
    *("two-dense tp2 sp recompute", "two-dense dp2", "two-dense cp2", "two-tied pp2 uneven"),
    *("two-moe tp2 sp ep2", "two-moe-r3 pp2", "two-oss tp2 sp etp2", "two-delta tp2"),
    *("two-nemotron tp2 sp ep2 recompute", "two-latent tp2 sp ep2", "two-sparse pp2 uneven"),
    "four-moe-r3 ep2 cp2",
)
"""Each axis of a layout, and each kind of layer under one."""
CHOSEN: dict[str, int | tuple[str, ...]] = {
    # whole runs: the life of a run, each stage, a death and a stop of each kind, an adapter, turns
    # with an environment, rollout beside training, and a real pretrained model run each time
    "tests/end_to_end/test_combinations.py": 0,
    "tests/end_to_end/test_several_adapters.py": 0,
    "tests/end_to_end/test_service.py": 0,
    "tests/end_to_end/test_service.py::test_clients_that_train_at_once_are_each_as_if_alone": 1,
    "tests/end_to_end/test_reward_model.py": 0,
    "tests/end_to_end/test_multi_agent.py": 0,
    "tests/end_to_end/test_mtp.py": 0,
    "tests/end_to_end/test_deepseek_v4.py": 0,
    "tests/end_to_end/test_precision.py": 0,
    "tests/end_to_end/test_on_policy.py": 0,
    "tests/end_to_end/test_flight.py": 0,
    "tests/end_to_end/test_sweep.py": 0,
    "tests/end_to_end/test_taken_away.py": 0,
    "tests/end_to_end/test_collectors.py": 0,
    "tests/end_to_end/test_collected_kinds.py": 0,
    "tests/end_to_end/test_waves.py": 0,
    "tests/end_to_end/test_examples.py": 0,
    "tests/end_to_end/test_real_data.py": 0,
    "tests/end_to_end/test_agents.py": 0,
    "tests/end_to_end/test_agents.py::test_a_dialogue_is_trained_on_token_by_token_and_resumes": 1,
    "tests/end_to_end/test_critic.py": 0,
    "tests/end_to_end/test_critic.py::"
    "test_a_resumed_run_has_the_critic_that_it_had_and_gives_it_away": 1,
    "tests/end_to_end/test_distillation.py": 0,
    "tests/end_to_end/test_distillation.py::"
    "test_a_run_that_learns_from_a_teacher_is_resumed_bit_for_bit": 1,
    "tests/end_to_end/test_eval_and_export.py::"
    "test_eval_of_all_steps_on_two_sets_starts_engines_once": 0,
    "tests/end_to_end/test_eval_and_export.py::test_what_the_model_card_says_works_as_it_stands": 0,
    "tests/end_to_end/test_eval_and_export.py::"
    "test_stop_strings_of_the_run_end_answers_beside_a_benchmark_that_has_none": 0,
    "tests/end_to_end/test_eval_and_export.py::"
    "test_an_exported_model_is_asked_without_its_run_and_compared_with_it": 0,
    "tests/end_to_end/test_faults.py": 0,
    "tests/end_to_end/test_faults.py::"
    "test_what_dies_or_hangs_is_replaced_and_the_run_is_the_one_that_was_not_hurt": 1,
    "tests/end_to_end/test_layouts.py::"
    "test_experts_with_replayed_routing_live_the_whole_life_and_go_on_under_another_layout": 0,
    "tests/end_to_end/test_learning_from_rows.py::"
    "test_engines_answer_held_out_prompts_where_the_recipe_has_some": ("supervised",),
    "tests/end_to_end/test_learning_from_rows.py::"
    "test_a_run_goes_on_bit_for_bit_from_a_checkpoint": 0,
    "tests/end_to_end/test_learning_from_rows.py::"
    "test_a_run_that_was_stopped_says_what_the_one_says_that_was_not": 0,
    "tests/end_to_end/test_adapter.py::test_a_resumed_run_is_the_run_that_was_not_stopped": 0,
    "tests/end_to_end/cluster/test_placement.py": 0,
    "tests/end_to_end/cluster/test_launch.py": 0,
    "tests/end_to_end/test_adapter.py::test_an_evaluation_asks_the_merged_model": 0,
    "tests/end_to_end/test_life_of_a_run.py::"
    "test_evaluations_on_an_engine_of_their_own_say_the_same": 0,
    "tests/end_to_end/test_life_of_a_run.py::test_a_model_that_guesses_ahead_changes_no_sample": 0,
    "tests/end_to_end/test_life_of_a_run.py::test_prometheus_is_served_a_run_while_it_goes_on": 0,
    "tests/end_to_end/test_life_of_a_run.py::test_resume_refuses_changed_prompts": 0,
    "tests/end_to_end/test_life_of_a_run.py::"
    "test_a_tracked_run_that_was_killed_goes_on_where_it_was": 0,
    "tests/end_to_end/cluster/test_doctor.py": 0,
    "tests/end_to_end/test_stops.py": 0,
    "tests/end_to_end/test_vision.py": 0,
    # hostile files: a few of the damages
    "tests/commands/test_damaged_files.py::test_nothing_that_is_whole_is_refused": 0,
    "tests/commands/test_damaged_files.py::test_a_damaged_file_is_never_an_internal_error": 4,
    # benchmarks beside TRL and plain PyTorch, and the rehearsal of the visit to a GPU
    "tests/bench/test_runs.py": 0,
    "tests/bench/gpu/test_visit.py::test_a_visit_says_every_line_and_none_is_to_be_mended": 0,
    "tests/bench/gpu/test_pack.py": 0,
    "tests/bench/gpu/test_running.py": 0,
    # trainers: each axis and kind of layer once, other layouts and kinds of both in between
    "tests/families": FAMILIES,
    "tests/backends/megatron/test_layouts.py::"
    "test_losses_over_three_steps_equal_those_of_one_process": LAYOUTS,
    "tests/backends/megatron/test_layouts.py::test_scores_equal_those_of_one_process": LAYOUTS,
    "tests/backends/megatron/test_layouts.py::"
    "test_weights_come_out_as_they_went_in_bit_for_bit": LAYOUTS,
    "tests/backends/megatron/test_layouts.py::"
    "test_every_algorithm_has_the_loss_and_gradients_of_one_process_that_cuts_nothing": 1,
    "tests/backends/megatron/test_distillation.py::"
    "test_every_layout_learns_from_teachers_what_one_process_does": 2,
    "tests/backends/megatron/test_distillation.py::"
    "test_losses_over_five_steps_are_those_of_plain_pytorch": 0,
    "tests/backends/megatron/architecture/test_lora.py": 1,
    "tests/backends/megatron/architecture/test_model.py::test_scores_equal_those_of_transformers": (
        "moe",
    ),
    "tests/backends/megatron/test_mtp.py": 1,
    "tests/backends/megatron/test_indexer.py::"
    "test_every_layout_has_the_losses_and_gradients_of_one_process": (
        *("sparse tp2 sp ep2 recompute", "v4 pp2"),
    ),
    "tests/backends/megatron/test_indexer.py::test_a_checkpoint_goes_on": 1,
    "tests/backends/megatron/test_ppo.py": 1,
    "tests/backends/megatron/test_learning_from_rows.py": 3,
    "tests/backends/megatron/test_learning_from_rows.py::"
    "test_two_steps_of_dpo_on_deepseek_v4_are_those_of_plain_pytorch": 0,
    "tests/backends/megatron/test_quantised.py": 2,
    "tests/backends/megatron/test_v4_release.py": 0,
    "tests/models/families/test_deepseek_v4.py::"
    "test_transformers_reads_the_same_bits_from_a_folder_with_the_names_of_the_releases": 0,
    "tests/models/families/test_deepseek_v4.py::"
    "test_a_release_in_fp8_and_fp4_keeps_each_number_through_conversion_and_export": 1,
    "tests/backends/megatron/test_rank_models.py": 1,
    "tests/backends/megatron/test_vision.py::test_steps_are_those_of_plain_pytorch": (
        *("qwen2-5-vl tied pp2", "qwen3-vl-moe ep2"),
    ),
    "tests/backends/megatron/test_vision.py": 1,
    "tests/backends/megatron/test_vision.py::"
    "test_an_adapter_of_the_decoder_trains_alike_under_every_layout": 0,
    "tests/backends/megatron/state/test_optimizer.py": 2,
    "tests/backends/megatron/state/test_checkpoint.py::"
    "test_a_checkpoint_of_one_rank_goes_on_under_another_layout": 2,
    "tests/backends/megatron/state/test_checkpoint.py::"
    "test_six_steps_equal_three_and_three_in_a_new_process_bit_for_bit": 1,
    "tests/backends/megatron/state/test_checkpoint.py::"
    "test_a_checkpoint_of_four_ranks_goes_on_in_one": 1,
    "tests/backends/megatron/state/test_snapshot.py::"
    "test_new_ranks_go_on_from_a_copy_as_the_old_ones_did": 1,
    "tests/backends/megatron/test_told.py::"
    "test_a_step_tells_what_the_policy_said_before_it_moved": 2,
    "tests/backends/megatron/test_layouts.py::"
    "test_sums_scans_means_and_gradients_of_packed_tokens_are_those_of_plain_loops": 2,
    "tests/backends/megatron/test_distillation.py::"
    "test_the_distance_to_the_teacher_is_a_figure_and_not_nothing": 1,
    "tests/backends/megatron/test_planned_memory.py": 4,
    # engines: what guesses ahead, families and replacements once
    "tests/backends/sglang/inside/cpu/test_drafts.py": 1,
    "tests/backends/sglang/inside/cpu/test_draft_records.py": 0,
    "tests/backends/sglang/client/test_parsers.py::"
    "test_a_process_that_was_killed_or_hangs_is_replaced": 0,
    "tests/backends/sglang/inside/cpu/test_guessing_families.py": 0,
    "tests/backends/sglang/inside/cpu/test_serving.py::"
    "test_what_others_took_meanwhile_is_not_counted_as_weights": 0,
    "tests/backends/sglang/test_families.py": ("deepseek-v3-yarn",),
    "tests/backends/sglang/test_on_update.py::"
    "test_each_token_is_of_the_weights_that_its_version_says": 1,
    "tests/backends/sglang/test_on_update.py::"
    "test_engines_that_are_updated_in_waves_say_the_version_of_each_token": ("drain",),
    "tests/backends/sglang/test_fleet.py::test_both_take_the_weights_and_hold_what_was_sent": (
        "DistributedChannel",
    ),
    # adapters in engines are in runs, too
    "tests/backends/sglang/inside/test_adapter.py": 0,
    "tests/backends/transformers/test_logits.py::"
    "test_what_users_import_from_transformers_works_where_miles_is_installed": 0,
    "tests/backends/sglang/test_vision.py": ("qwen3_vl_moe",),
    "tests/backends/sglang/test_vision.py::test_towers_that_sglang_mistakes_are_refused": 9,
    "tests/backends/sglang/test_replacing.py": 0,
    "tests/backends/sglang/test_experts.py::"
    "test_requests_that_are_retracted_have_the_whole_record_of_two_bytes_a_number": 0,
    "tests/backends/sglang/test_quantised.py": 1,
    "tests/backends/sglang/test_exact.py": ("qwen3_moe-2-2-0.7",),
    "tests/backends/sglang/test_shared_experts.py": 0,
    "tests/backends/sglang/weights/test_shards.py": 1,
    "tests/backends/sglang/launch/test_warm.py": 0,
    "tests/backends/sglang/launch/test_server.py::"
    "test_an_engine_that_dies_is_named_and_nothing_of_it_is_left": 0,
    "tests/backends/sglang/launch/test_arguments.py": 1,
    "tests/backends/sglang/launch/test_arguments.py::"
    "test_what_sglang_takes_and_nobody_else_sets_is_let_through": 0,
    "tests/backends/sglang/launch/test_arguments.py::"
    "test_what_sglang_does_not_know_is_refused_in_its_words": 0,
    "tests/backends/sglang/launch/test_arguments.py::"
    "test_an_abbreviation_of_what_the_recipe_decides_is_refused_with_its_key": 0,
    "tests/backends/sglang/launch/test_cpu_path.py::"
    "test_an_engine_starts_where_scikit_learn_is_installed": 0,
    # foreign packages, and rows to learn from of each kind
    "tests/agents/foreign/test_install.py::test_what_pip_says_is_in_the_error": 0,
    "tests/doctor/test_roles.py::test_rows_to_learn_from_are_counted": 1,
    # servers of tools and environments: a call by each road, a death, a kill and a hang
    **dict.fromkeys(
        (
            f"tests/agents/test_mcp_tools.py::test_{rest}"
            for rest in (
                *(
                    "a_server_that_dies_again_and_again_stops_the_run",
                    "two_tools_of_one_name_are_refused",
                ),
                *(
                    "a_slow_call_is_given_up_and_the_server_goes_on",
                    "a_tool_that_the_server_lacks_is_refused",
                ),
                "a_server_at_an_address_that_goes_away_is_an_error_and_comes_back",
                "an_agent_in_a_process_of_its_own_has_servers_of_its_own",
            )
        ),
        0,
    ),
    "tests/agents/test_environment.py::"
    "test_a_process_that_is_stopped_is_replaced_and_nobody_fails": 0,
    "tests/agents/foreign/test_install.py::"
    "test_what_is_installed_to_the_end_counts_and_nothing_else_does": 0,
    # processes that play on another node: hangs are those of this one
    "tests/backends/ray/test_node_processes.py::"
    "test_one_that_hangs_there_is_named_and_costs_its_own_episode_alone": 0,
    # stores that are away: a mirror's server dies each time
    "tests/backends/stores/test_store.py::test_a_server_that_is_away_is_worth_another_try": 0,
    "tests/doctor/test_trial.py::test_a_trial_that_hangs_is_a_fail_and_what_it_started_is_ended": 0,
    # pieces of other people that bear no contract, and schedulers' scripts that run
    "tests/listings/test_plugins.py::test_what_bears_no_contract_is_named_with_the_reason": 4,
    "tests/jobs/test_running_scripts.py::test_a_run_that_is_there_already_is_gone_on_with": 1,
    "tests/jobs/test_running_scripts.py::test_only_a_time_limit_queues_a_job_again": 0,
    # compilers and what of them is loaded
    "tests/platform/test_cpu_kernel_library.py::test_another_compiler_has_a_library_of_its_own": 0,
    "tests/platform/test_no_compiler.py::test_who_imports_a_part_of_the_compiler_gets_the_whole": 0,
    "tests/platform/test_exact.py::test_a_row_has_the_same_bits_whatever_is_beside_it": 4,
    # pieces of groups, and long dialogues
    "tests/rollout/collect/test_remote_groups.py::"
    "test_a_batch_of_pieces_is_that_of_whole_groups": 4,
    "tests/rollout/episode/test_session.py::"
    "test_memory_grows_with_the_length_of_a_dialogue_and_not_with_its_turns": 1,
    # rewards that hang: one whose line is said
    "tests/rollout/rewards/test_processes.py::test_where_it_hangs_is_said_with_its_line": 1,
    "tests/rollout/rewards/test_processes.py::test_what_is_wrong_is_named": 6,
    "tests/workers/test_isolated.py::test_what_hangs_ends_at_its_bound_with_its_line": 1,
    "tests/workers/test_isolated.py::test_what_is_wrong_is_named": 3,
    # what a process imports, and how it prints: each of these starts one
    "tests/test_imports.py::test_help_loads_nothing_heavy": 2,
    "tests/test_imports.py::test_pages_load_nothing_heavy": 2,
    "tests/test_imports.py::test_completion_loads_nothing_heavy": 2,
    "tests/test_imports.py::test_refusals_come_before_anything_heavy": 2,
    "tests/test_imports.py::test_no_process_of_a_dry_run_imports_torch": 1,
    "tests/console/test_pager.py::test_long_pages_of_verbs_have_a_pager": 2,
    "tests/recipe/test_malformed.py::test_the_program_says_so_and_ends_with_3": 2,
    "tests/commands/test_verbs.py::test_a_dry_run_is_one_screen_of_what_was_set_and_decided": 1,
    "tests/commands/test_terminals.py::test_a_verb_says_the_same_on_every_terminal": 5,
    "tests/commands/test_terminals.py::test_a_process_without_utf_8_prints_too": 1,
    "tests/runtime/inputs/test_data_check_rows.py::test_a_shipped_recipe_has_no_problem": 1,
    # pages at one width each
    "tests/web/browser/test_accessibility.py::test_no_page_violates_a_rule": 1,
    "tests/web/browser/test_runs_page.py::test_pages_of_runs_in_trouble_violate_no_rule": 1,
    # conversions that are stopped, or measured
    "tests/conversion/test_convert.py::test_a_full_disk_half_way_keeps_what_is_finished": 0,
    "tests/conversion/test_convert.py::test_memory_does_not_grow_with_the_model": 0,
    "tests/conversion/test_hub_source.py": 0,
    "tests/conversion/test_hub_source.py::test_a_name_on_the_hub_is_fetched_and_converted": 1,
    "tests/conversion/test_hub_source.py::test_a_name_that_nobody_has_is_refused": 1,
    # plans
    "tests/plan/test_golden.py": 2,
    "tests/plan/test_precision.py::test_both_sides_have_the_formats_that_the_recipe_asks_for": 3,
    "tests/runtime/test_planning.py::"
    "test_a_recipe_is_planned_for_the_smallest_machine_that_the_list_names": 2,
    "tests/plan/test_precision.py::test_recipes_in_a_format_are_planned_for_their_machines": 3,
    "tests/plan/test_published.py::test_what_is_known_to_run_fits": 8,
}
"""File or test -> how many of its cases `make test` runs, evenly spread over the list (0: none), or
the cases by their names. What is not in the table runs each time, unless it is marked by itself."""


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests that `make test` does not run, by the table."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        for key in (f"{path}::{item.originalname}", path, *_folders(path)):
            if key in CHOSEN:
                # a row of a file is for each of its tests
                cases[f"{key} {item.originalname}"].append(item)
                break
    left = []
    for name, those in cases.items():
        wanted = CHOSEN[name.split()[0]]
        left += [
            item for place, item in enumerate(those) if not _is_chosen(item, place, those, wanted)
        ]
    return left


def _folders(path: str) -> list[str]:
    return [parent.as_posix() for parent in Path(path).parents]


def _is_chosen(
    item: pytest.Item, place: int, those: list[pytest.Item], wanted: int | tuple[str, ...]
) -> bool:
    if isinstance(wanted, int):
        return place in {at * len(those) // wanted for at in range(wanted)}
    call = getattr(item, "callspec", None)
    return call is not None and (call.id in wanted or bool({*call.params.values()} & {*wanted}))
