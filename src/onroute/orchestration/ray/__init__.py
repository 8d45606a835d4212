"""The same driver on Ray: trainer ranks, engine and environments are actors. Nothing else imports ray."""
