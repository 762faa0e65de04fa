"""DTR by calls: what is evicted is what calls of modules leave behind; making it again replays the call."""
