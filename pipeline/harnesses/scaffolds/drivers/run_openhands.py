"""Runs an OpenHands SDK agent in the current directory: `start.py FOLDER run_openhands.py OPTIONS.json`."""

# The SDK is in the scaffold's own folder, and is not typed here.
# pyright: basic, reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.tool import Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(usage_id="agent", **options["llm"])
    condenser = None
    if condense := options.get("condense"):
        small = llm.model_copy(update={"usage_id": "condenser"})
        condenser = LLMSummarizingCondenser(llm=small, **condense)
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    agent = Agent(llm=llm, tools=tools, condenser=condenser)
    # One turn more than it is given: it is the session that ends it, as with every scaffold.
    turns = options["max_turns"] + 1
    conversation = Conversation(
        agent=agent, workspace=str(Path.cwd()), visualizer=None, max_iteration_per_run=turns
    )
    conversation.send_message(options["instruction"])
    conversation.run()
    print("finished")


if __name__ == "__main__":
    main()
