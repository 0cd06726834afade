"""What the third review found, entry by entry, and the tests that show it mended.

    python tests/findings.py [--json] [--no-tests] [WORD ...]

Each entry of issue 48 is mended (by tests, which are run), no fault (with the reason), gone (its code was removed) or
open (with what is missing). Entries of other issues are listed with their number and not counted. An entry one of whose
tests fails, or does not exist, counts as open. The last line is one JSON object; the exit code is the number of open
entries. WORD: only entries that begin with it, such as B or H5.
"""
import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = {"A": 5, "B": 17, "C": 9, "D": 13, "E": 7, "F": 15, "G": 21, "H": 26, "I": 16}  # letters and their numbers
ISSUES = {46: ["A", "G1", "G2", "G3", "G4", "G6", "H1", *(f"I{number}" for number in range(1, 12))], 47: ["D"]}

# entry: tests, "file::test" with further tests of the same file after blanks.
PAGES = "findings::pages_say_what_a_review_missed"
MENDED = {
    "B1": ["attempts::a_run_goes_back_once_until_it_has_saved_a_new_step "
           "other_deaths_after_the_step_back_do_not_lead_further_back "
           "a_new_durable_step_counts_anew"],
    "B2": ["attempts::a_refusal_after_the_run_has_trained_has_patience "
           "nodes_are_checked_again_after_the_second_death_on_one_of_them "
           "a_config_that_is_half_written_stops_a_new_run_but_not_one_that_has_begun",
           "device::a_node_that_has_lost_its_devices_is_named"],
    "B3": ["watchdog::a_phase_in_parts_is_one_phase_whose_deadline_begins_anew_and_others_learn_that_it_moves"],
    "B4": ["watchdog::a_rank_waits_as_long_as_the_slowest_one_moves"],
    "B5": ["attempts::a_start_of_a_job_has_gained_something_once_it_has_saved_a_step"],
    "B6": ["launcher::a_terminal_that_is_closed_makes_it_save_and_leave",
           "watchdog::a_signal_asks_and_does_not_end nohup_keeps_its_meaning"],
    "B7": ["launcher::ranks_do_not_outlive_the_shell_of_their_round"],
    "B8": ["launcher::nothing_that_a_program_prints_is_run help_is_a_text_and_starts_nothing"],
    "B9": ["launcher::the_preflight_waits_for_what_may_pass"],
    "B10": ["verdict::every_fault_of_a_file_system_that_passes_is_a_disk"],
    "B11": ["attempts::half_a_line_saved_before_a_planned_restart_has_patience_too"],
    "B12": ["watchdog::a_mode_that_takes_longer_than_the_steps_before_it_keeps_its_own_time"],
    "B13": ["run_lock::another_machine_of_the_same_name_keeps_its_lock"],
    "B14": ["validation::only_a_number_can_be_the_best"],
    "B15": ["memory::what_the_allocator_only_keeps_is_no_leak"],
    "B16": ["launcher::an_option_that_does_not_exist_stops_at_once_and_copies_of_volumes_do_not_stay"],
    "B17": ["findings::an_error_of_the_picture_does_not_cost_the_epoch", "launcher::a_dry_run_is_passed_on"],
    "C1": ["repository::the_job_of_every_site_survives_its_time_limit"],
    "C2": ["verdict::the_first_own_exception_is_the_cause"],
    "C3": ["diagnostics::without_a_verdict_there_is_none a_case_that_runs_out_of_memory_is_told_and_ends_no_table "
           "help_is_a_text"],
    "C4": ["smoke::one_device_and_two_ranks_pass the_recorded_figures_stand_beside_those_of_the_full_size "
           "the_deepspeed_settings_are_the_recorded_ones"],
    "C5": [f"{PAGES}[C5]"],
    "C6": ["diagnostics::help_is_a_text", "launcher::help_is_a_text_and_starts_nothing"],
    "C7": ["cost::production_config_has_its_recorded_size"],
    "C8": [f"{PAGES}[C8]",
           "datalist::a_larger_share_of_the_subjects_has_all_of_a_smaller_one_and_nobody_who_is_held_out"],
    "C9": ["explain::recorded_texts_find_their_row every_fragment_of_the_page_is_found_by_its_own_text"],
    "E1": ["device::an_intel_package_for_another_torch_is_not_imported an_intel_package_that_raises_is_survived"],
    "E2": [f"{PAGES}[E2]"],
    "E3": ["runtime::the_tools_work_without_fcntl without_fcntl_a_training_is_one_sentence"],
    "E4": ["device::a_device_without_float64_is_named_with_the_key_to_change"],
    "E5": [f"{PAGES}[E5]"],
    "E6": ["bids", "dicom", "lists::tables_folders_patterns_and_names",
           "pair_verdict::one_pair_of_a_list_that_stands_out_is_doubtful",
           "qc_and_motion::a_known_motion_is_found_and_undone", "template::the_middle_of_known_maps_is_found",
           "monai_transforms::all_entries_come_onto_the_fixed_grid inside_monai"],
    "E7": ["transforms::nitransforms_writes_what_we_read"],
    "F1": ["validation::a_single_volume_is_not_registered_to_itself"],
    "F2": ["agree::ranks_with_different_configs_are_all_refused "
           "ranks_of_two_trainings_at_one_port_do_not_become_one_model"],
    "F3": ["config::bad_files_are_one_sentence"],
    "F4": ["config::a_text_stays_as_it_is_typed numbers_are_decimal_and_truth_has_its_words"],
    "F5": ["run_lock::a_job_that_was_requeued_takes_its_own_folder_back",
           "repository::the_job_of_every_site_survives_its_time_limit"],
    "F6": ["attempts::a_start_of_a_job_has_gained_something_once_it_has_saved_a_step"],
    "F8": ["data::workers_that_could_not_hand_over_a_batch_are_refused"],
    "F9": ["launcher::an_interpreter_without_what_is_needed_is_one_sentence a_folder_of_somebody_else_is_one_sentence"],
    "F10": ["launcher::a_shell_that_is_a_task_of_srun_is_refused"],
    "F11": ["watchdog::a_signal_asks_and_does_not_end who_presses_ctrl_c_twice_does_not_wait"],
    "F12": ["config::home_and_variables_in_paths_are_those_of_a_shell"],
    "F13": ["findings::a_refused_start_leaves_no_folder_and_is_no_death"],
    "F14": ["launcher::an_option_that_does_not_exist_stops_at_once_and_copies_of_volumes_do_not_stay"],
    "F15": ["launcher::an_option_that_does_not_exist_stops_at_once_and_copies_of_volumes_do_not_stay "
            "a_wrong_number_of_ranks_is_one_sentence ranks_of_one_host_in_a_job_of_several_are_refused",
            "agree::a_port_that_is_taken_is_named",
            "prepare::a_page_that_cannot_be_written_blames_the_folder_of_logs"],
    "G5": ["segment"],
    "G7": ["run_lock::of_several_generations_that_with_the_settings_of_the_command_is_continued"],
    "G9": ["cost::what_is_not_prepared_yet_is_counted_from_the_files "
           "a_step_that_does_not_fit_is_told_with_what_to_change",
           "preflight::ids_that_select_nothing_fail_before_the_training"],
    "G10": ["plan"],
    "G11": [f"{PAGES}[G11]", f"{PAGES}[G11-config]"],
    "G13": [f"{PAGES}[G13]"],
    "G14": ["findings::a_refused_start_leaves_no_folder_and_is_no_death"],
    "G15": ["config::bad_files_are_one_sentence a_missing_key_is_named "
            "a_config_of_the_project_is_found_by_its_name_from_anywhere"],
    "G17": ["findings::bars_of_a_job_print_a_line_a_minute"],
    "G18": ["universal::its_licence_is_in_the_file_and_in_its_card", "export::the_file_says_what_it_is",
            "install::the_commands_explain_themselves"],
    "G20": [f"{PAGES}[G20]", f"{PAGES}[G20-page]", f"{PAGES}[G20-codes]"],
    "G21": [f"{PAGES}[G21]"],
    "G12": ["pair_verdict", "scores"],
    "G16": ["default::what_needs_no_torch_is_told_at_once"],
    "G19": ["scores::similarity_before_does_not_depend_on_model_or_config"],
    "H2": ["points::landmarks_as_people_have_them landmarks_that_can_be_read_in_two_ways_are_refused"],
    "H3": ["points::landmarks_as_people_have_them landmarks_that_can_be_read_in_two_ways_are_refused"],
    "H4": ["fields_in_files::fields_of_other_programs_are_not_taken_for_ours"],
    "H5": ["nifti::two_matrices_that_differ_none_and_a_sheared_one_are_told"],
    "H6": ["nifti::a_sheared_volume_is_written_with_its_sform_alone"],
    "H7": ["nifti::two_matrices_that_differ_none_and_a_sheared_one_are_told"],
    "H8": ["default::the_command_without_options_gives_the_same_field"],
    "H9": ["datalist::a_bids_root_from_datalad_has_each_image_once"],
    "H10": ["datalist::a_bids_root_from_datalad_has_each_image_once"],
    "H11": ["nnunet::regions_stay_regions the_written_data_set_has_the_regions"],
    "H12": ["metrics::a_structure_that_one_image_lacks_is_as_far_off_as_the_image_is_long",
            "scores::structures_that_one_map_lacks_are_named"],
    "H13": ["lists::fields_of_two_pairs_with_one_learn2reg_name_are_refused"],
    "H14": ["nifti::files_that_are_not_there_or_packed_otherwise_say_so",
            "datalist::a_folder_or_a_dead_link_is_no_file"],
    "H15": ["nifti::suffixes_in_capitals", "datalist::capitals_in_suffixes"],
    "H16": ["points::landmarks_as_people_have_them"],
    "H17": ["nifti::files_that_are_not_there_or_packed_otherwise_say_so"],
    "H18": ["default::a_device_that_is_not_there_is_one_sentence"],
    "H19": ["default::whatever_holds_a_volume an_array_alone_says_that_its_spacing_is_unknown "
            "what_holds_no_volume_is_one_sentence"],
    "H20": ["nifti::labels"],
    "H21": ["nifti::labels_with_a_scale_factor_are_rounded"],
    "H22": ["nifti::soft_and_full_masks"],
    "H23": ["nifti::one_plane_along_another_axis_says_so"],
    "H24": ["nifti::soft_and_full_masks"],
    "H25": ["findings::a_fresh_clone_is_told_that_no_data_were_named"],
    "H26": [f"{PAGES}[H26]"],
    "I13": [f"{PAGES}[I13]"],
    "I14": [f"{PAGES}[I14]"],
    "I12": ["metrics::a_structure_that_one_image_lacks_is_as_far_off_as_the_image_is_long"],
}
NO_FAULT = {
    "G8": "two configs of one data set do not collide in silence: the second is refused with both values "
          "(tests/test_cache.py), and data.cache names another folder",
    "I15": "the key is hashed before it goes into the generator: run.seed 5 and 5 + 2^32 draw differently",
    "I16": "the docstring says what an image has with itself; a number for refine.weight is in voxels^2, so with "
           "voxels half as large it smooths half as far in mm, but auto infers it from each pair of one modality; the "
           "third is a statement about tables",
}
GONE = {"F7": "PBS support was removed whole"}
OPEN = {}


def all_entries():
    return [f"{letter}{number}" for letter, count in ENTRIES.items() for number in range(1, count + 1)]


def issue_of(entry):
    """The number of the issue that an entry belongs to."""
    return next((issue for issue, owned in ISSUES.items() if entry in owned or entry[0] in owned), 48)


def tests_of(entry):
    """[(file, test or None)] of a mended entry."""
    found = []
    for words in MENDED[entry]:
        name, _, tests = words.partition("::")
        file = f"tests/test_{name}.py"
        found += [(file, f"test_{test}") for test in tests.split()] or [(file, None)]
    return found


def missing_tests(entry):
    """Tests of an entry that do not exist."""
    return [f"{file}::{test}" if test else file for file, test in tests_of(entry) if not (ROOT / file).is_file()
            or (test and not re.search(rf"^def {test.split('[')[0]}\(", (ROOT / file).read_text(), re.M))]


def run_tests(entries):
    """Run the tests of these entries once. Returns: {entry: tests that failed}."""
    wanted = sorted({f"{file}::{test}" if test else file for entry in entries for file, test in tests_of(entry)})
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", *wanted], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return {entry: [name for name in failed for file, test in tests_of(entry)
                    if name.split("::")[0] == file and (test is None or f"{name}[".startswith(f"{file}::{test}["))
                    or name == f"{file}::{test}"] for entry in entries}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only entries that begin with one of these")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--no-tests", action="store_true", help="the table alone: run nothing, trust the names")
    args = parser.parse_args(argv)
    entries = [entry for entry in all_entries() if not args.words or entry.startswith(tuple(args.words))]
    ours = [entry for entry in entries if issue_of(entry) == 48]
    mended = [entry for entry in ours if entry in MENDED]
    failed = {entry: [f"{name}: no such test" for name in missing_tests(entry)] for entry in mended}
    if not args.no_tests:
        for entry, names in run_tests([entry for entry in mended if not failed[entry]]).items():
            failed[entry] += names
    rows, counts = [], {"mended": 0, "no_fault": 0, "gone": 0, "open": 0}
    for entry in entries:
        if issue_of(entry) != 48:
            rows.append((entry, f"issue {issue_of(entry)}", ""))
            continue
        if entry in NO_FAULT:
            state, why = "no_fault", NO_FAULT[entry]
        elif entry in GONE:
            state, why = "gone", GONE[entry]
        elif entry in mended and not failed[entry]:
            state, why = "mended", ", ".join(f"{file}{'::' * bool(test)}{test or ''}" for file, test in tests_of(entry))
        else:
            state, why = "open", "; ".join(failed.get(entry, [])) or OPEN.get(entry, "nothing is known of it")
        counts[state] += 1
        rows.append((entry, state, why))
    for row in rows:
        if row[1] == "open" or not args.json:
            print("{:<4} {:<9} {}".format(*row), file=sys.stderr if args.json else sys.stdout)
    print(json.dumps({"entries": len(ours), **counts}))
    return min(counts["open"], 100)


if __name__ == "__main__":
    sys.exit(main())
