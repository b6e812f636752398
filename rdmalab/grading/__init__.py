"""Grading: a submitted notebook in, points and sentences out, without trusting a line of it."""
