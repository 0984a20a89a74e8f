"""A program as a report: requested, compiled, predicted and measured collectives."""
