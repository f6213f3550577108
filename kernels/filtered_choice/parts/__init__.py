"""The work of filtered_choice for one part of a row's vocabulary."""
