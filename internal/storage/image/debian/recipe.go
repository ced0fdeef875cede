// Package debian makes root filesystems of Debian packages and Python wheels,
// without a registry. mmdebstrap fetches the packages from the archives of the
// host's apt, and pip fetches the wheels from the indexes of the host's pip.
//
// No configuration, credentials, caches or host name of the host stay in the
// result. The same packages and wheels give the same files.
package debian

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Recipe is the definition of a root filesystem.
type Recipe struct {
	// Suite is Debian's release, by its code name.
	Suite string `json:"suite"`
	// Include are packages beside the essential ones.
	Include []string `json:"include,omitempty"`
	// Pip are requirements that have wheels, in the form of pip install's
	// arguments.
	Pip []string `json:"pip,omitempty"`
	// Mirror is the archive of the packages; empty is the host's archives.
	Mirror string `json:"mirror,omitempty"`
}

// Options say how a recipe is built.
type Options struct {
	// Sources are the recipe's (Recipe.Sources).
	Sources []string
	// Log receives the output of the programs.
	Log io.Writer
	// Pip is called when the installation of wheels begins.
	Pip func()
	// Epoch is the time given to files that the build makes; zero is the time
	// of the newest file of a package.
	Epoch time.Time
}

var (
	suitePattern   = regexp.MustCompile(`^[a-z][a-z0-9-]{0,63}$`)
	packagePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+~:-]+)?$`)
	// A requirement is never an option of pip, and never a path.
	pipPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?[ ]*([=<>!~].*)?$`)
)

// Validate checks a recipe: its words become arguments of programs.
func (r Recipe) Validate() error {
	if !suitePattern.MatchString(r.Suite) {
		return fmt.Errorf("suite %q: write the code name of a Debian release, such as bookworm", r.Suite)
	}
	for _, p := range r.Include {
		if !packagePattern.MatchString(p) {
			return fmt.Errorf("package %q: write a Debian package's name, or NAME=VERSION", p)
		}
	}
	for _, p := range r.Pip {
		if !pipPattern.MatchString(p) || strings.ContainsAny(p, "\x00\r\n") {
			return fmt.Errorf("wheel %q: write a requirement as pip install takes it, such as requests or numpy>=2", p)
		}
	}
	if r.Mirror != "" && (!strings.Contains(r.Mirror, "://") || strings.ContainsAny(r.Mirror, " \t\r\n\x00[]")) {
		return fmt.Errorf("mirror %q: write a URL, such as one of those in /etc/apt", r.Mirror)
	}
	return nil
}

// Python reports whether the image has Python: then it also has pip and a
// command named python.
func (r Recipe) Python() bool {
	return len(r.Pip) > 0 || slices.ContainsFunc(r.Include, func(p string) bool { return strings.HasPrefix(p, "python3") })
}

// packages are all packages that mmdebstrap installs.
func (r Recipe) packages() []string {
	all := slices.Clone(r.Include)
	if r.Python() {
		all = append(all, "python3", "python3-pip", "python-is-python3")
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// programs checks for the programs of the host that a build needs.
func programs() error {
	if os.Geteuid() != 0 {
		return errors.New("building an image installs packages as root: run this as root")
	}
	for program, pkg := range map[string]string{"mmdebstrap": "mmdebstrap", "unshare": "util-linux", "apt-get": "apt", "apt-config": "apt"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s is missing: apt-get install %s", program, pkg)
		}
	}
	return nil
}
