"""The part of a step that deals with speculation: which drafts to request, and the drafter's view of each sequence."""
