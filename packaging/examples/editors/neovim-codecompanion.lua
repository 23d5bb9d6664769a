-- Neovim with codecompanion.nvim, which speaks ACP: an adapter that is the agent alice.
require("codecompanion").setup({
  adapters = {
    acp = {
      alice = function()
        return require("codecompanion.adapters").extend("gemini_cli", {
          name = "alice",
          formatted_name = "alice",
          commands = { default = { "agentconnect", "acp", "alice" } },
          -- Logging in is the agent's own affair, inside its boundary.
          defaults = { timeout = 20000 },
        })
      end,
    },
  },
  interactions = { chat = { adapter = "alice" } },
  strategies = { chat = { adapter = "alice" } },
})
