"""Advantages, losses and the numbers that judge them: pure maths, one file per algorithm."""
