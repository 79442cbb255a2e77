"""SequenceParallelTrainer and what it needs."""
