#!/usr/bin/env python3
"""Sends a failure of a job to a chat or a phone: a hook.

    [hooks]
    on-failure = ["/usr/local/lib/rekindle/notify.py", "discord", "/etc/rekindle/notify.address"]

The first argument is the service (slack, also for Mattermost, discord, teams or ntfy). The second is a file that contains the address, which is
often a secret: give the file mode 0600. The hook reads one JSON document from standard input (docs/hooks.md).
"""

import json
import sys
import urllib.request
from pathlib import Path


def request(service, address, document):
    """The request that the service expects, with the sentence about the failure."""
    text = document.get("text", f"job {document['job']}: {document['event']}")
    if service == "ntfy":
        headers = {"Title": "rekindle", "Priority": "high", "Content-Type": "text/plain; charset=utf-8"}
        return urllib.request.Request(address, text.encode(), headers)
    bodies = {
        "slack": {"text": text},
        # A message of Discord has at most 2000 characters.
        "discord": {"content": text[:2000]},
        # A workflow of Teams that was made from "post to a channel when a webhook request is received".
        "teams": {
            "type": "message",
            "attachments": [
                {
                    "contentType": "application/vnd.microsoft.card.adaptive",
                    "content": {
                        "type": "AdaptiveCard",
                        "version": "1.2",
                        "body": [{"type": "TextBlock", "text": text, "wrap": True}],
                    },
                }
            ],
        },
    }
    return urllib.request.Request(address, json.dumps(bodies[service]).encode(), {"Content-Type": "application/json"})


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("slack", "discord", "teams", "ntfy"):
        sys.exit(f"usage: {sys.argv[0]} slack|discord|teams|ntfy FILE-WITH-THE-ADDRESS")
    service, file = sys.argv[1:]
    address = Path(file).read_text().strip()
    with urllib.request.urlopen(request(service, address, json.load(sys.stdin)), timeout=10) as answer:
        answer.read(1000)


main()
