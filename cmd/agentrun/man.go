package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func newManCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages of all commands into a folder",
		Long: `Write the manual pages of agentrun and all its commands into a folder, for packages
and for make install. They are of section 1.`,
		Example: `  agentrun man ./man && man -l ./man/agentrun-fork.1`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o750); err != nil {
				return fmt.Errorf("make the folder of manual pages: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			// The pages must not depend on the time at which they are made.
			date := time.Unix(0, 0).UTC()
			header := &doc.GenManHeader{Section: "1", Source: "AgentRun", Manual: "AgentRun", Date: &date}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return fmt.Errorf("write manual pages: %w", err)
			}
			return nil
		},
	}
}
