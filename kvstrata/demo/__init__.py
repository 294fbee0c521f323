"""The demo: one text, five questions' worth of tiers, a table. `kvstrata demo` runs it; nothing else imports it."""
