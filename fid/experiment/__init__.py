"""An experiment: the same run under several attentions and seeds, trained, scored and reported alike."""
