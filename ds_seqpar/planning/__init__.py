"""What is decided before anything runs: layouts, schedules, plans. Integers only, no tensor, no process group."""
