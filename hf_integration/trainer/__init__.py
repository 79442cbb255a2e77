"""SequenceParallelTrainer and the modules that it needs."""
