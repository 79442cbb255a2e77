"""SequenceParallelTrainer and its supporting modules."""
