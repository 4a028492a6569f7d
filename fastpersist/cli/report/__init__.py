"""`fastpersist report`: `command`; `table` for the terminal; `page` and `png` draw what `charts` make of `records`."""
